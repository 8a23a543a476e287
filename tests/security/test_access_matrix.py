"""Every identity tries every operation on every tenant, against one worker with mutual TLS: some 2,000 cells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest

from kvstore.client.failover import Endpoint
from kvstore.client.limits import ClientLimits
from kvstore.client.local import LocalTransport
from kvstore.client.pool import Bulk, Credentials
from kvstore.client.store import Store
from kvstore.errors import PermissionDenied
from kvstore.format.places import Name
from kvstore.security.access import PERMISSIONS
from kvstore.transport.status import CallFailed
from kvstore.v1 import control_pb2 as control
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.control_pb2_grpc import ControlStub
from kvstore.v1.kvstore_pb2_grpc import KVStoreStub
from kvstore.worker.limits import WorkerLimits
from tests.kit.cases import for_each
from tests.kit.secured import Issuer, Secured, bearer, secured
from tests.kit.stores import SMALL
from tests.kit.workers import WAIT_S
from tests.security.operations import BLOCK, ELSEWHERE, KEY, KV, OPERATIONS, TOKENS, Cell, Operation

pytestmark = pytest.mark.slow

TENANTS = ("", "acme", "globex")
DENIED = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)

IDENTITIES = {
    "cert:worker": {"*": "read"},
    "cert:ops": {"*": "admin"},
    "cert:spiffe://test/reader": {"acme": "read"},
    "writer": {"acme": "write"},
    "owner": {"acme": "admin"},
    "both": {"acme": "read", "globex": "write"},
    "plain": {"": "write"},
    "mover": {"*": "write"},
    "nothing": {},
}
RANK = {"read": 1, "write": 2, "admin": 3}


@dataclass(frozen=True)
class Who:
    """Somebody who calls: a certificate's name, or a token beside the certificate of somebody who may do all."""

    name: str
    token: str | None = None
    known: bool = True


WHO = (
    Who("cert:worker"),
    Who("cert:ops"),
    Who("cert:spiffe://test/reader"),
    Who("writer", "good"),
    Who("owner", "good"),
    Who("both", "good"),
    Who("plain", "good"),
    Who("mover", "good"),
    Who("nothing", "good"),
    Who("cert:stranger", known=False),
    Who("nobody", "good", known=False),
    Who("owner", "expired", known=False),
    Who("owner", "revoked", known=False),
    Who("owner", "bound to another", known=False),
    Who("owner", "signed by another", known=False),
    Who("owner", "garbage", known=False),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    limits = WorkerLimits(hold_lease_s=900)  # what each cell holds stays until it is released
    with secured(tmp_path_factory.mktemp("matrix"), IDENTITIES, limits=limits) as running:
        running.revoke("revoked")
        yield running


@pytest.fixture(scope="module")
def owner(served: Secured) -> Store:
    """The store as the worker itself has it."""
    return Store(LocalTransport(served.member))


def token_of(who: Who, issuer: Issuer, tmp_path: Path) -> str | None:
    """Returns the token that an identity shows beside its certificate."""
    match who.token:
        case "good":
            return issuer.token(who.name)
        case "expired":
            return issuer.token(who.name, ttl_s=60, ago_s=600)
        case "revoked":
            return issuer.token(who.name, "revoked")
        case "bound to another":
            return issuer.token(who.name, bound=bytes(32))
        case "signed by another":
            return Issuer(tmp_path).token(who.name)
        case "garbage":
            return "eyJhbGciOiJub25lIn0.eyJzdWIiOiJvd25lciJ9."
    return None


def allowed(who: Who, need: str, tenant: str) -> bool:
    """True if the call must be allowed, by the words above."""
    if not who.known:
        return False
    roles = {name: RANK[role] for name, role in IDENTITIES[who.name].items()}
    scope, _, role = need.rpartition(":")
    if scope == "any":
        return max(roles.values(), default=0) >= RANK[role]
    every = roles.get("*", 0)
    return (every if scope == "every" else max(every, roles.get(tenant, 0))) >= RANK[role]


def snapshot(served: Secured) -> object:
    """All that a call could change."""
    chunks = Name("chunks")
    files = [
        entry.name for folder in served.root.list(chunks) for entry in served.root.list(Name(f"{chunks}/{folder.name}"))
    ]
    service = served.worker.service
    namespaces = [namespace.digest for namespace in served.member.node.namespaces(WAIT_S)]
    pins = [pin.id for pin in served.member.pins()]
    limits = service.worker.limits
    return sorted(files), sorted(pins), sorted(namespaces), len(service.holds), limits, served.worker.health.is_serving


@for_each("who", WHO)
def test_every_cell_of_the_table(who: Who, served: Secured, owner: Store, tmp_path: Path) -> None:
    # With a token the certificate alone would be allowed everything: the token counts.
    name = "ops" if who.token is not None else who.name.removeprefix("cert:")
    tls = served.authority.client("client", name) if "://" in name else served.authority.client(name)
    token = token_of(who, served.issuer, tmp_path)
    file = served.token_file(token) if token is not None else None
    endpoint = Endpoint(served.address, Bulk.TCP, ClientLimits(), Credentials(tls, file))
    try:
        with served.channel(tls) as channel:
            stubs = KVStoreStub(channel), ControlStub(channel)
            for name, operation in OPERATIONS.items():
                # An unknown caller is unknown everywhere: one tenant shows that.
                for tenant in TENANTS if who.known else TENANTS[1:2]:
                    cell = prepared(
                        served, owner, Cell(*stubs, bearer(token), endpoint, who.name, tenant, b"", b"", "")
                    )
                    check_cell(served, who, name, operation, allowed(who, operation.need, tenant), cell)
    finally:
        endpoint.close()


def prepared(served: Secured, owner: Store, cell: Cell) -> Cell:
    """The tenant has a prompt, a block, a hold and a pin."""
    cache = owner.namespace("m", SMALL, tenant=cell.tenant)
    cache.put(TOKENS, KV)
    cache.blocks.put([KEY], [BLOCK])
    node = served.member.node
    chain = node.chains.of(cache.namespace, TOKENS.astype(np.uint32))
    hold = node.hold(chain)
    served.worker.service.holds.add(hold)
    cell.digest, cell.hold, cell.pin = cache.namespace.digest, hold.id, served.member.pin(chain, 60.0, "test").id
    return cell


def check_cell(served: Secured, who: Who, name: str, operation: Operation, may: bool, cell: Cell) -> None:
    before, denied, lines = None if may else snapshot(served), served.denied, served.audited_bytes()
    code: grpc.StatusCode | None = None
    try:
        operation.run(cell)
    except grpc.RpcError as error:
        code = error.code()
    except CallFailed as refused:
        is_denied = isinstance(refused.error, PermissionDenied)
        code = grpc.StatusCode.PERMISSION_DENIED if is_denied else grpc.StatusCode.UNKNOWN
    where = f"{who} {name} on {cell.tenant!r}"
    assert (code not in DENIED) == may, f"{where}: {code}"
    if not may:
        assert snapshot(served) == before, where
        assert served.denied == denied + 1, where
        (line,) = served.audited(lines)
        # A caller that may not even open a bulk connection is denied that.
        assert line["event"] == "denied" and line["method"] in (operation.method, "OpenBulk"), where
        if who.known:
            assert line["identity"] == who.name, where
    elif PERMISSIONS[operation.method].audited:
        acts = [(line["identity"], line["method"]) for line in served.audited(lines) if line["event"] == "act"]
        assert acts == [(who.name, operation.method)], where
    served.worker.service.holds.release(cell.hold)
    for pin in served.member.pins():
        served.member.unpin(pin.id)


def test_every_rpc_has_its_line_in_the_table() -> None:
    kvstore, steering = pb.DESCRIPTOR.services_by_name["KVStore"], control.DESCRIPTOR.services_by_name["Control"]
    rpcs = {rpc.name for rpc in kvstore.methods} | {f"Control.{rpc.name}" for rpc in steering.methods}
    assert rpcs <= PERMISSIONS.keys()


def test_every_method_of_the_table_is_tried() -> None:
    assert {operation.method for operation in OPERATIONS.values()} | ELSEWHERE == set(PERMISSIONS)


def test_lists_show_only_what_the_caller_may_read(served: Secured, owner: Store) -> None:
    for tenant in TENANTS:
        owner.namespace("m", SMALL, tenant=tenant).put(TOKENS, KV)
        owner.namespace("m", SMALL, tenant=tenant).pin(TOKENS, 600.0)
    seen: dict[str, tuple[set[str], int]] = {}
    with served.channel(served.authority.client("client")) as channel:
        stub = KVStoreStub(channel)
        for name in ("writer", "both", "mover"):
            metadata = bearer(served.issuer.token(name))
            listed = stub.ListNamespaces(pb.ListNamespacesRequest(), timeout=WAIT_S, metadata=metadata)
            pins = list(stub.ListPins(pb.ListPinsRequest(), timeout=WAIT_S, metadata=metadata))
            seen[name] = {each.namespace.tenant for each in listed}, len(pins)
    assert seen == {"writer": ({"acme"}, 1), "both": ({"acme", "globex"}, 2), "mover": (set(TENANTS), 3)}


def test_stats_show_nothing_of_other_tenants(served: Secured) -> None:
    with served.channel(served.authority.client("client")) as channel:
        stub = KVStoreStub(channel)
        mine = stub.Stats(pb.StatsRequest(), timeout=WAIT_S, metadata=bearer(served.issuer.token("writer")))
        every = stub.Stats(pb.StatsRequest(), timeout=WAIT_S, metadata=bearer(served.issuer.token("mover")))
    assert set(mine.counters) == {"calls", "wire_bytes_in", "wire_bytes_out"}
    assert "denied_tenant" in every.counters
