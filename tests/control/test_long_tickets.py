"""Tickets of a real worker: they outlive their clients, and end in one of three ways."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from kvstore.census.selection import Selection
from kvstore.client.control import Control
from kvstore.errors import InvalidRequest, Overloaded, Unavailable
from kvstore.tickets import State, Ticket
from kvstore.v1 import control_pb2 as pb
from kvstore.v1.kvstore_pb2 import ACT_PREFETCH, TIER_DISK, TIER_ROOT
from kvstore.wire.statuses import NoTicket
from kvstore.worker.worker import Worker
from kvstore.writes import WriteMode
from tests.kit.administration import KV, SIZE, TOKENS, raw_control, steering
from tests.kit.stores import SMALL
from tests.kit.tiers import Acting, faulty, held
from tests.kit.workers import WAIT_S, Served, connected, eventually, packed, refused, serving
from tests.worker.test_moves import working

pytestmark = pytest.mark.slow


def test_a_selection_is_counted_and_then_cleared_but_for_what_is_pinned() -> None:
    with serving() as served, connected(served) as store:
        for tenant in ("acme", "beta"):
            store.namespace("m", SMALL, tenant=tenant).put(TOKENS, KV)
        acme, beta = (store.namespace("m", SMALL, tenant=tenant) for tenant in ("acme", "beta"))
        acme.pin(TOKENS[: 2 * SIZE])
        counted = store.control.clear(Selection(tenant="acme"), dry_run=True).wait(WAIT_S)
        assert counted.state is State.DONE and (counted.counts["chunks"], counted.counts["pinned_chunks"]) == (2, 2)
        assert acme.match(TOKENS) == len(TOKENS)
        cleared = store.control.clear(Selection(tenant="acme")).wait(WAIT_S)
        assert (cleared.state, cleared.done, cleared.identity) == (State.DONE, cleared.total, "anyone")
        assert (cleared.counts["chunks"], cleared.counts["pinned_chunks"]) == (2, 2)
        assert (acme.match(TOKENS), beta.match(TOKENS)) == (2 * SIZE, len(TOKENS))
        everything = store.control.clear(Selection(namespace=acme.namespace.digest), pinned=True).wait(WAIT_S)
        assert everything.counts["chunks"] == 2 and acme.match(TOKENS) == 0 and beta.match(TOKENS) == len(TOKENS)
        assert [each.id for each in store.control.tickets()] == [everything.id, cleared.id, counted.id]


def test_what_cannot_be_meant_is_refused_before_there_is_a_ticket() -> None:
    with serving() as served, raw_control(served) as stub:
        for request in (
            pb.ClearSelectedRequest(),
            pb.ClearSelectedRequest(selection=pb.Selection(written_by="anybody")),
            pb.ClearSelectedRequest(selection=pb.Selection(tenant="acme", older_than_s=-1.0)),
            pb.ClearSelectedRequest(selection=pb.Selection(tenant="acme", since_s=float("nan"))),
            pb.ClearSelectedRequest(selection=pb.Selection(tenant="acme"), deadline_s=float("inf")),
            pb.ClearSelectedRequest(selection=pb.Selection(namespace=b"short")),
        ):
            code, _, _ = refused(lambda asked=request: stub.ClearSelected(asked, timeout=WAIT_S))  # type: ignore[misc]
            assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert not list(stub.ListTickets(pb.ListTicketsRequest(), timeout=WAIT_S))


def test_a_clear_of_nothing_is_refused_before_it_is_a_ticket() -> None:
    with serving() as served, steering(served) as control, connected(served) as store:
        for clear in (control.clear, store.clear):
            with pytest.raises(InvalidRequest, match="no namespace of this root is meant by tenant 'nobody'"):
                clear(Selection(tenant="nobody"))
        assert control.tickets() == []


def test_prompts_are_prefetched_one_after_the_other_and_counted() -> None:
    with working(faulty()) as (acting, served), connected(served) as store:
        cache = store.namespace("m", acting.cache.layout)
        acting.put(1, 4)
        acting.put(2, 3)
        heard: list[Ticket] = []
        prompts = [acting.prompts.tokens(1, 4), acting.prompts.tokens(2, 5)]
        done = store.control.prefetch(cache, prompts).follow(heard.append, WAIT_S)
        assert (done.state, done.done, done.total, done.unit) == (State.DONE, 9, 9, "chunks")
        assert done.counts["chunks"] == 7 and "7 of 9 chunks" in done.message
        assert heard[-1] == done and done.about == "2 prompts of m to memory"
        assert all(acting.in_memory(1, 4)) and all(acting.in_memory(2, 3))
        assert store.control.move(cache, prompts, "root").wait(WAIT_S).state is State.DONE
        assert not any(acting.in_memory(1, 4))


def test_prompts_that_no_worker_could_move_are_refused_before_there_is_a_ticket() -> None:
    with working(faulty()) as (acting, served), raw_control(served) as stub, connected(served) as store:
        digest = store.namespace("m", acting.cache.layout).namespace.digest
        one = [packed(acting.prompts.tokens(1, 1))]
        for request in (
            pb.BeginMoveRequest(namespace=digest, prompts=one),  # no act
            pb.BeginMoveRequest(namespace=digest, prompts=[], act=ACT_PREFETCH),
            pb.BeginMoveRequest(namespace=digest, prompts=1025 * one, act=ACT_PREFETCH),
            pb.BeginMoveRequest(namespace=digest, prompts=one, act=ACT_PREFETCH, tier=TIER_DISK),  # no disk
            pb.BeginMoveRequest(
                namespace=digest, prompts=one, act=ACT_PREFETCH, tier=TIER_ROOT
            ),  # prefetch to the root
            pb.BeginMoveRequest(namespace=digest, prompts=[b"odd"], act=ACT_PREFETCH),
            pb.BeginMoveRequest(namespace=digest, prompts=one, act=ACT_PREFETCH, deadline_s=-1.0),
        ):
            code, _, _ = refused(lambda asked=request: stub.BeginMove(asked, timeout=WAIT_S))  # type: ignore[misc]
            assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert not list(stub.ListTickets(pb.ListTicketsRequest(), timeout=WAIT_S))


def moving(acting: Acting, control: Control, served: Served) -> Ticket:
    """A ticket that moves dirty chunks to the root, and runs as long as the root is blocked."""
    with connected(served) as other:
        cache = other.namespace("m", acting.cache.layout)
        return control.move(cache, [acting.prompts.tokens(1, 4)], "root").last


def test_a_ticket_goes_on_when_its_client_is_gone_and_another_one_follows_it() -> None:
    root = faulty()
    with working(root, write=WriteMode.BEHIND) as (acting, served), steering(served) as control:
        with held(root):
            acting.put(1, 4)
            with steering(served) as first:
                ticket = moving(acting, first, served)
            time.sleep(0.1)
            (now,) = control.tickets()
            assert (now.id, now.state) == (ticket.id, State.RUNNING)
            assert control.ticket(ticket.id).wait(0.2).state is State.RUNNING
        assert control.ticket(ticket.id).wait(WAIT_S).state is State.DONE
        assert all(acting.on_root(1, 4)) and not any(acting.in_memory(1, 4))


def test_cancelling_ends_a_ticket_soon_whoever_does_it() -> None:
    root = faulty()
    with working(root, write=WriteMode.BEHIND) as (acting, served), steering(served) as control:
        with held(root):
            acting.put(1, 4)
            ticket = moving(acting, control, served)
            eventually(lambda: control.tickets()[0].state is State.RUNNING, "it has begun")
            with steering(served) as other:
                other.ticket(ticket.id).cancel()
                ended = other.ticket(ticket.id).wait(WAIT_S)  # the root hangs all the time
            assert ended.state is State.CANCELLED and "what was done until then stays done" in ended.message
            assert control.ticket(ticket.id).cancel().state is State.CANCELLED
        acting.assert_settled()


def test_a_ticket_past_its_deadline_fails() -> None:
    root = faulty()
    with working(root, write=WriteMode.BEHIND) as (acting, served), connected(served) as store:
        with held(root):
            acting.put(1, 4)
            cache = store.namespace("m", acting.cache.layout)
            ended = store.control.move(cache, [acting.prompts.tokens(1, 4)], "root", deadline=0.3).wait(WAIT_S)
            assert ended.state is State.FAILED and "the deadline passed" in ended.message


def test_a_ticket_that_nobody_has_is_not_found() -> None:
    with serving() as served, steering(served) as control, raw_control(served) as stub:
        with pytest.raises(NoTicket, match="list tickets with kvstore tickets"):
            control.ticket("0123456789abcdef")
        for call in (
            lambda: list(stub.WatchTicket(pb.WatchTicketRequest(id="no"), timeout=WAIT_S)),
            lambda: stub.CancelTicket(pb.CancelTicketRequest(id=""), timeout=WAIT_S),
        ):
            code, _, kind = refused(call)
            assert (code, kind) == (grpc.StatusCode.NOT_FOUND, "NoTicket")


def test_who_follows_a_ticket_waits_while_the_worker_has_too_many_calls() -> None:
    root = faulty()
    with working(root, write=WriteMode.BEHIND) as (acting, served), steering(served) as control:
        with held(root), ThreadPoolExecutor(1) as threads:
            acting.put(1, 4)
            ticket = control.ticket(moving(acting, control, served).id)
            with served.worker.service.gate.passing(light=False):
                control.set_limits({"calls_max": 1})
                followed = threads.submit(lambda: ticket.wait(WAIT_S))
                eventually(lambda: served.worker.service.calls.counters()["calls_refused"], "it was refused")
                ticket.cancel()
            assert followed.result().state is State.CANCELLED


def test_watches_leave_half_of_the_calls_to_others() -> None:
    """Each takes a thread for as long as its ticket runs, which may be a day."""
    root = faulty()
    with working(root, write=WriteMode.BEHIND) as (acting, served), steering(served) as control:
        with held(root), raw_control(served) as stub:
            acting.put(1, 4)
            control.set_limits({"calls_max": 4})
            asked = pb.WatchTicketRequest(id=moving(acting, control, served).id)
            watches = [stub.WatchTicket(asked, timeout=WAIT_S) for _ in range(2)]
            assert all(next(watch).ticket.id == asked.id for watch in watches)
            code, _, _ = refused(lambda: [*stub.WatchTicket(asked, timeout=WAIT_S)])
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert control.tickets()[0].id == asked.id, "others are served"
            for watch in watches:
                watch.cancel()
            eventually(lambda: served.worker.control._watches.count == 0, "both are over")
            control.cancel(control.ticket(asked.id).last)


def test_a_worker_that_was_restarted_has_forgotten_its_tickets() -> None:
    with serving() as served, steering(served) as control:
        with connected(served) as store:
            store.namespace("m", SMALL)
        ticket = control.clear(Selection(tenant=""), dry_run=True)
        assert ticket.wait(WAIT_S).state.ended
        served.worker.stop()
        again = Worker(served.member, served.address)
        try:
            again.start()
            with connected(again.address) as store:
                assert store.control.tickets() == []
                with pytest.raises(NoTicket):
                    store.control.ticket(ticket.id)
        finally:
            again.stop()


def test_a_hundred_tickets_that_are_not_done_are_enough() -> None:
    root = faulty()
    with working(root, write=WriteMode.BEHIND, moves_max=200) as (acting, served), connected(served) as store:
        cache, control = store.namespace("m", acting.cache.layout), store.control
        with held(root):
            acting.put(1, 4)
            tokens = acting.prompts.tokens(1, 4)
            begun = [control.move(cache, [tokens], "root") for _ in range(100)]
            with pytest.raises(Overloaded, match="100 tickets are not done yet"):
                control.move(cache, [tokens], "root")
            eventually(lambda: served.worker.service.gauges()["tickets_running"] == 4, "four run")
            for ticket in begun:
                ticket.cancel()
            assert [each.wait(WAIT_S).state for each in begun] == 100 * [State.CANCELLED]
        counters = served.worker.service.counters()
        assert (counters["tickets_cancelled"], counters["tickets_done"]) == (100, 0)


def test_a_worker_that_drains_ends_its_tickets_and_those_who_watch_them() -> None:
    root = faulty()
    with working(root, write=WriteMode.BEHIND) as (acting, served), steering(served) as control:
        with held(root), ThreadPoolExecutor(1) as threads:
            acting.put(1, 4)
            ticket = control.ticket(moving(acting, control, served).id)
            heard = threading.Event()
            followed = threads.submit(lambda: ticket.follow(lambda now: heard.set(), WAIT_S))
            assert heard.wait(WAIT_S)
            assert served.worker.drain(WAIT_S), "a watch does not delay it"
            assert isinstance(followed.exception(WAIT_S), Unavailable) or (followed.result().state is State.CANCELLED)
