"""Access to tickets: a ticket names who asked, and others see and end only tickets of tenants that they may."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore import ClientTls
from kvstore.census.selection import Selection
from kvstore.client.control import Control
from kvstore.errors import PermissionDenied
from kvstore.node.member import Member
from kvstore.tickets import State
from kvstore.wire.statuses import NoTicket
from kvstore.worker.control import service
from kvstore.worker.control.runner import Step
from tests.kit.secured import Secured, secured
from tests.kit.stores import SMALL, kv_of
from tests.kit.workers import WAIT_S

pytestmark = pytest.mark.slow

TOKENS = np.arange(2 * SMALL.chunk_tokens)
IDENTITIES = {
    "alice": {"acme": "admin"},
    "rita": {"acme": "read"},
    "bob": {"beta": "admin"},
    "olga": {"*": "admin"},
    "ward": {"*": "read"},
}


@contextmanager
def steering(worker: Secured, identity: str) -> Iterator[Control]:
    token = worker.token_file(worker.issuer.token(identity), identity)
    with kvstore.connect(worker.address, tls=ClientTls(str(worker.authority.ca)), token_file=str(token)) as store:
        yield store.control


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Secured]:
    with secured(tmp_path, IDENTITIES, mutual=False) as served:
        token = served.token_file(served.issuer.token("olga"))
        tls = ClientTls(str(served.authority.ca))
        with kvstore.connect(served.address, tls=tls, token_file=str(token)) as store:
            for tenant in ("acme", "beta"):
                store.namespace("m", SMALL, tenant=tenant).put(TOKENS, kv_of(SMALL, TOKENS))
        yield served


def test_a_ticket_says_who_asked_and_is_shown_to_those_who_may_read_its_tenant(worker: Secured) -> None:
    with steering(worker, "alice") as alice, steering(worker, "olga") as olga:
        acme = alice.clear(Selection(tenant="acme"), dry_run=True).wait(WAIT_S)
        every = olga.clear(Selection(older_than_s=1e6), dry_run=True).wait(WAIT_S)
    assert (acme.identity, acme.state, acme.counts["chunks"]) == ("alice", State.DONE, 2)
    assert (every.identity, every.state) == ("olga", State.DONE)
    shown = {}
    for identity in IDENTITIES:
        with steering(worker, identity) as control:
            shown[identity] = {each.id for each in control.tickets()}
    assert shown == {
        "alice": {acme.id},
        "rita": {acme.id},
        "bob": set(),
        "olga": {acme.id, every.id},
        "ward": {acme.id, every.id},
    }


def test_what_one_may_not_ask_for_makes_no_ticket_and_changes_nothing(worker: Secured) -> None:
    before = worker.denied
    for identity, selection in (
        ("rita", Selection(tenant="acme")),
        ("bob", Selection(tenant="acme")),
        ("alice", Selection(older_than_s=1e-9)),
        ("alice", Selection(fingerprint="sha")),
        ("ward", Selection(tenant="acme")),
    ):
        with steering(worker, identity) as control:
            with pytest.raises(PermissionDenied):
                control.clear(selection)
    assert worker.denied == before + 5
    with steering(worker, "olga") as olga:
        assert olga.tickets() == []
        assert olga.clear(Selection(older_than_s=1e-9), dry_run=True).wait(WAIT_S).counts["chunks"] == 4


def test_a_ticket_is_watched_by_who_may_read_and_ended_by_who_may_administer_its_tenant(
    worker: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(_member: Member, _selection: Selection, step: Step, **_: bool) -> str:
        while True:
            step.pause(0.1)

    monkeypatch.setattr(service, "clear_selected", endless)
    with steering(worker, "olga") as olga, steering(worker, "alice") as alice:
        ticket = olga.clear(Selection(tenant="acme"))
        for identity, error in (("bob", NoTicket), ("rita", PermissionDenied), ("ward", PermissionDenied)):
            with steering(worker, identity) as control:
                with pytest.raises(error):
                    control.ticket(ticket.id).cancel()
                with pytest.raises(PermissionDenied):
                    control.cancel(ticket.last)
        with steering(worker, "bob") as bob, pytest.raises(PermissionDenied):
            bob.follow(ticket.last, lambda now: None, WAIT_S)
        with steering(worker, "rita") as rita:
            assert rita.ticket(ticket.id).wait(0.2).identity == "olga"
        assert olga.ticket(ticket.id).last.state is State.RUNNING
        alice.ticket(ticket.id).cancel()
        assert ticket.wait(WAIT_S).state is State.CANCELLED
    ended = [each for each in worker.audited() if each["method"] == "Control.CancelTicket"]
    assert [each["outcome"] for each in ended if each["identity"] == "alice"] == ["OK"]
    assert {each["identity"] for each in ended if each["outcome"] in ("tenant", "role")} >= {"bob", "rita", "ward"}
