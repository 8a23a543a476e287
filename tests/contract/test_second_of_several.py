"""A call that names several holds is checked for each of them, in every order."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import KVStoreStub
from kvstore.worker.limits import WorkerLimits
from tests.kit.patience import PATIENCE_S
from tests.kit.secured import Secured, bearer, secured
from tests.kit.tenants import hold_id

IDENTITIES = {"cert:ops": {"*": "admin"}, "owner": {"acme": "admin"}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured(tmp_path_factory.mktemp("tls"), IDENTITIES, limits=WorkerLimits(hold_lease_s=900)) as running:
        yield running


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
