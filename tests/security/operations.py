"""Every operation that clients can ask a worker for, and the role each needs: by hand, beside the worker's table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.client.failover import Endpoint
from kvstore.transport.channel import SHORT_CALLS, FrameKind, Mode, encode_request
from kvstore.v1 import control_pb2 as control
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.control_pb2_grpc import ControlStub
from kvstore.v1.kvstore_pb2_grpc import KVStoreStub
from tests.kit.stores import SMALL, kv_of
from tests.kit.wire import packed
from tests.kit.workers import WAIT_S

TOKENS = np.arange(3 * SMALL.chunk_tokens)
KV = kv_of(SMALL, TOKENS)
LAYOUT = pb.Layout(**SMALL.to_dict())
BLOCK, KEY = b"a block", b"k" * 16
PROMPT, KEYS, SIZES = packed(TOKENS), bytes([16]) + KEY, len(BLOCK).to_bytes(4, "little")


@dataclass
class Cell:
    """The tools of an operation: a client's stubs, its metadata, and a tenant's namespace, hold and pin."""

    kv: KVStoreStub
    control: ControlStub
    metadata: Any
    endpoint: Endpoint
    who: str
    tenant: str
    digest: bytes
    hold: bytes
    pin: str

    def call(self, method: str, request: Any) -> Any:
        """The answer of a method with one message to it."""
        service, _, name = method.rpartition(".")
        answer = getattr(self.control if service else self.kv, name)(request, timeout=WAIT_S, metadata=self.metadata)
        return list(answer) if hasattr(answer, "__next__") else answer


@dataclass(frozen=True)
class Operation:
    """``need`` is a role in the tenant; after ``any:`` in some tenant, after ``every:`` in all of them."""

    method: str
    need: str
    run: Callable[[Cell], object]


def one(method: str, need: str, request: Callable[[Cell], Any]) -> Operation:
    return Operation(method, need, lambda cell: cell.call(method, request(cell)))


def opened(need: str, name: Callable[[Cell], str]) -> Operation:
    def request(cell: Cell) -> Any:
        return pb.OpenNamespaceRequest(namespace=pb.Namespace(name=name(cell), layout=LAYOUT, tenant=cell.tenant))

    return one("OpenNamespace", need, request)


def bulk(method: str, need: str, kind: FrameKind, request: Callable[[Cell], Any], mode: int = Mode.STREAM) -> Operation:
    def run(cell: Cell) -> None:
        with cell.endpoint.bulk.link(WAIT_S) as link:
            assert link is not None
            link.channel.limit(WAIT_S, WAIT_S)
            said = encode_request(WAIT_S, mode, request(cell).SerializeToString())
            link.channel.send(kind, link.next_number(), [said])
            link.receive(FrameKind.SLOTS, FrameKind.READY, FrameKind.ANSWER)
            link.channel.alive = False  # the rest is not wanted

    return Operation(method, need, run)


def put(cell: Cell) -> None:
    start = pb.PutStart(namespace=cell.digest, tokens=packed(TOKENS[:1]))  # no full chunk
    cell.kv.Put(iter([pb.PutRequest(start=start)]), timeout=WAIT_S, metadata=cell.metadata)


def prompt(kind: Callable[..., Any], **more: Any) -> Callable[[Cell], Any]:
    return lambda cell: kind(namespace=cell.digest, tokens=PROMPT, **more)


def blocks(kind: Callable[..., Any], **more: Any) -> Callable[[Cell], Any]:
    return lambda cell: kind(namespace=cell.digest, keys=KEYS, **more)


def short(method: str, request: Callable[[Cell], Any]) -> Operation:
    return bulk(method, "read", FrameKind.CALL, request, SHORT_CALLS.index(method))


OPERATIONS = {
    "open": opened("read", lambda cell: "m"),
    "make a namespace": opened("write", lambda cell: f"made by {cell.who}"),
    "list namespaces": one("ListNamespaces", "any:read", lambda cell: pb.ListNamespacesRequest()),
    "match": one("Match", "read", prompt(pb.MatchRequest)),
    "get": one("Get", "read", prompt(pb.GetRequest)),
    "get what is held": one("Get", "read", lambda cell: pb.GetRequest(hold=cell.hold)),
    "hold": one("Hold", "read", prompt(pb.HoldRequest)),
    "renew": one("Renew", "read", lambda cell: pb.RenewRequest(holds=[cell.hold])),
    "release": one("Release", "read", lambda cell: pb.ReleaseRequest(hold=cell.hold)),
    "put": Operation("Put", "write", put),
    "pin": one("Pin", "write", prompt(pb.PinRequest, ttl_s=60)),
    "unpin": one("Unpin", "write", lambda cell: pb.UnpinRequest(id=cell.pin)),
    "list pins": one("ListPins", "any:read", lambda cell: pb.ListPinsRequest()),
    "count refs": one("CountRefs", "read", prompt(pb.CountRefsRequest)),
    "match blocks": one("MatchBlocks", "read", blocks(pb.MatchBlocksRequest)),
    "get blocks": one("Get", "read", blocks(pb.GetRequest, sizes=SIZES)),
    "clear": one("Clear", "admin", lambda cell: pb.ClearRequest(namespace=cell.digest)),
    "stats": one("Stats", "any:read", lambda cell: pb.StatsRequest()),
    "open bulk": one("OpenBulk", "any:read", lambda cell: pb.OpenBulkRequest()),
    "bulk get": bulk("Get", "read", FrameKind.GET, prompt(pb.GetRequest)),
    "bulk get of memory": bulk("Get", "read", FrameKind.GET, prompt(pb.GetRequest, memory_only=True)),
    "bulk get blocks": bulk("Get", "read", FrameKind.GET, blocks(pb.GetRequest, sizes=SIZES)),
    "bulk put": bulk(
        "Put",
        "write",
        FrameKind.PUT,
        lambda cell: pb.PutStart(namespace=cell.digest, tokens=packed(TOKENS + 20_000)),
        0,
    ),
    "bulk match blocks": short("MatchBlocks", blocks(pb.MatchBlocksRequest)),
    "bulk hold": short("Hold", prompt(pb.HoldRequest)),
    "bulk release": short("Release", lambda cell: pb.ReleaseRequest(hold=cell.hold)),
    "prefetch": one("Control.Prefetch", "write", prompt(control.PrefetchRequest)),
    "evict first": one("Control.EvictFirst", "write", prompt(control.EvictFirstRequest)),
    "clear a tenant": one(
        "Control.ClearSelected",
        "admin",
        lambda cell: control.ClearSelectedRequest(selection={"tenant": cell.tenant}, dry_run=True),
    ),
    "clear by fingerprint": one(
        "Control.ClearSelected",
        "every:admin",
        lambda cell: control.ClearSelectedRequest(selection={"fingerprint": "f"}, dry_run=True),
    ),
    "list operations": one("Control.ListOperations", "any:read", lambda cell: control.ListOperationsRequest()),
}
ELSEWHERE = {"MapMemory", "Reflection", "Control.GetOperation", "Control.CancelOperation"}
"""Methods that are tried beside the table: they need another connection, or something that runs."""
