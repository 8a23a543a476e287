"""A call that names several holds is checked for each of them, in every order."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import KVStoreStub
from kvstore.worker.limits import WorkerLimits
from tests.kit.patience import PATIENCE_S
from tests.kit.secured import Secured, bearer, secured
from tests.kit.stores import SMALL, kv_of

TOKENS = np.arange(2 * SMALL.chunk_tokens, dtype=np.uint32)
IDENTITIES = {"cert:ops": {"*": "admin"}, "owner": {"acme": "admin"}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured(tmp_path_factory.mktemp("tls"), IDENTITIES, limits=WorkerLimits(hold_lease_s=900)) as running:
        yield running


def hold_id(served: Secured, tenant: str) -> bytes:
    """Takes a hold as a client of this tenant has it, behind the worker's access rules; returns its id."""
    node = served.member.node
    cache = Store(LocalTransport(served.member)).namespace("m", SMALL, tenant=tenant)
    cache.put(TOKENS, kv_of(SMALL, TOKENS))
    hold = node.hold(node.chains.of(cache.namespace, TOKENS))
    served.worker.service.holds.add(hold)
    return hold.id


@pytest.mark.parametrize(
    ("tenants", "is_allowed"),
    [
        (["acme"], True),
        (["acme", "acme"], True),
        (["globex"], False),
        (["acme", "globex"], False),
        (["globex", "acme"], False),
        (["acme", "acme", "globex"], False),
        (["acme", "globex", "acme"], False),
    ],
    ids=str,
)
def test_renew_of_several_holds_needs_role_for_each(served: Secured, tenants: list[str], is_allowed: bool) -> None:
    request = pb.RenewRequest(holds=[hold_id(served, tenant) for tenant in tenants])
    with served.channel(served.authority.client("ops")) as channel:
        metadata = bearer(served.issuer.token("owner"))
        try:
            answer = KVStoreStub(channel).Renew(request, timeout=PATIENCE_S, metadata=metadata)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.PERMISSION_DENIED
            assert not is_allowed
        else:
            assert is_allowed
            assert not answer.ended
