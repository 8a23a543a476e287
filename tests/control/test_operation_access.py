"""Access to operations: clients see and cancel only operations of tenants that they may."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore import ClientTls
from kvstore.census.selection import Selection
from kvstore.client.operation import Operation
from kvstore.client.store import Store
from kvstore.core.operations import OperationRun
from kvstore.errors import PermissionDenied
from tests.kit.secured import Secured, secured
from tests.kit.stores import SMALL, kv_of
from tests.kit.workers import WAIT_S

pytestmark = pytest.mark.slow

TOKENS = np.arange(2 * SMALL.chunk_tokens)
IDENTITIES = {
    "alice": {"acme": "admin"},
    "rita": {"acme": "read"},
    "wanda": {"acme": "write"},
    "bob": {"beta": "admin"},
    "olga": {"*": "admin"},
    "ward": {"*": "read"},
}


@contextmanager
def connected(worker: Secured, identity: str) -> Iterator[Store]:
    token = worker.token_file(worker.issuer.token(identity), identity)
    with kvstore.connect(worker.address, tls=ClientTls(str(worker.authority.ca)), token_file=str(token)) as store:
        yield store


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Secured]:
    with secured(tmp_path, IDENTITIES, mutual=False) as served:
        token = served.token_file(served.issuer.token("olga"))
        tls = ClientTls(str(served.authority.ca))
        with kvstore.connect(served.address, tls=tls, token_file=str(token)) as store:
            for tenant in ("acme", "beta"):
                store.namespace("m", SMALL, fingerprint="f", tenant=tenant).put(TOKENS, kv_of(SMALL, TOKENS))
        yield served


def ended(operation: Operation) -> Operation:
    assert operation.wait(WAIT_S)
    return operation


def test_operation_is_listed_for_those_who_may_read_its_tenant(worker: Secured) -> None:
    with connected(worker, "alice") as alice, connected(worker, "olga") as olga:
        acme = ended(alice.clear(Selection(tenant="acme"), dry_run=True))
        every = ended(olga.clear(Selection(fingerprint="f"), dry_run=True))
        assert (acme.last.identity, acme.state, acme.counts["chunks"]) == ("alice", "done", 2)
        assert (every.last.identity, every.state) == ("olga", "done")
    shown = {}
    for identity in IDENTITIES:
        with connected(worker, identity) as store:
            shown[identity] = {each.id for each in store.operations()}
    assert shown == {
        "alice": {acme.id},
        "rita": {acme.id},
        "wanda": {acme.id},
        "bob": set(),
        "olga": {acme.id, every.id},
        "ward": {acme.id, every.id},
    }


def test_operation_is_cancelled_by_those_who_may_begin_it(worker: Secured) -> None:
    def endless(run: OperationRun) -> str:
        while True:
            run.pause(WAIT_S)

    begin = worker.member.node.operations.begin
    runs = {kind: begin(kind, endless, tenant="acme").status.id for kind in ("clear", "prefetch")}

    def of(store: Store, kind: str) -> Operation:
        return next(each for each in store.operations() if each.id == runs[kind])

    for identity, kinds in (("rita", ("clear", "prefetch")), ("wanda", ("clear",)), ("ward", ("clear", "prefetch"))):
        for kind in kinds:
            with connected(worker, identity) as store:
                assert not of(store, kind).wait(0)
                with pytest.raises(PermissionDenied):
                    of(store, kind).cancel()
    for identity, kind in (("wanda", "prefetch"), ("alice", "clear")):
        with connected(worker, identity) as store:
            of(store, kind).cancel()
            assert ended(of(store, kind)).message == f"cancelled by {identity}"
    audited = [each for each in worker.audited() if each["method"] == "Control.CancelOperation"]
    assert {each["identity"] for each in audited if each["outcome"] == "OK"} == {"alice", "wanda"}
    assert {each["identity"] for each in audited if each["outcome"] == "role"} == {"rita", "wanda", "ward"}
