"""The control service of a real worker: what lies where, tickets that outlive their clients, limits, health, drain."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from kvstore.census.selection import Selection
from kvstore.client.control import Control
from kvstore.errors import InvalidRequest, KVStoreError, Overloaded, Unavailable
from kvstore.node.limits import Limits
from kvstore.results import LimitValue
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.tickets import State, Ticket
from kvstore.v1 import control_pb2 as pb
from kvstore.v1.control_pb2_grpc import ControlStub
from kvstore.v1.kvstore_pb2 import ACT_PREFETCH, TIER_DISK, TIER_ROOT
from kvstore.wire.statuses import Busy, NoTicket
from kvstore.worker.worker import Worker
from kvstore.writes import WriteMode
from tests.node.stores import SMALL, TINY, chunk_files, kv_of, member_on
from tests.patience import returns
from tests.root.faulty import FaultyRoot, Hang, Rule
from tests.tiers.acting import Acting, faulty, held
from tests.worker.serving import WAIT_S, Served, connected, eventually, packed, raw_channel, refused, serving
from tests.worker.test_moves import working

pytestmark = pytest.mark.slow

SIZE = SMALL.chunk_tokens
"""A fifth of a second on a machine that has nothing else to do."""
TOKENS = np.arange(4 * SIZE)
KV = kv_of(SMALL, TOKENS)


@contextmanager
def steering(served: Served) -> Iterator[Control]:
    with connected(served) as store:
        yield store.control


@contextmanager
def raw_control(served: Served) -> Iterator[ControlStub]:
    """The generated stub, all that a client in another language has."""
    with raw_channel(served) as channel:
        yield ControlStub(channel)


def damage_payload(path: Path) -> None:
    """Turns the last byte of a chunk, which no reader would take then."""
    before, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def value(found: list[LimitValue] | KVStoreError, name: str) -> LimitValue:
    assert not isinstance(found, KVStoreError), found
    return next(each for each in found if each.name == name)


# Where things lie


def test_lookup_says_where_each_chunk_lies_and_reads_no_payload(tmp_root: Path) -> None:
    with serving(tmp_root) as served, connected(served) as store:
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, KV, priority=70, ttl=300)
        for path in chunk_files(tmp_root):
            damage_payload(path)
        before, times = served.member.stats(), [path.stat().st_mtime_ns for path in chunk_files(tmp_root)]
        places = store.control.lookup(cache, np.arange(6 * SIZE))
        assert [each.index for each in places] == [0, 1, 2, 3]
        for place in places:
            root = place.root
            assert root is not None and root.lineage is not None
            assert root.size_bytes == chunk_files(tmp_root)[0].stat().st_size
            assert (root.hints.priority, root.hints.ttl_s, root.uses) == (70, 300, 0)
            assert abs(root.last_use_s - time.time()) < 120 and abs(root.lineage.written_s - time.time()) < 120
            assert root.lineage.session == served.member.presence.current().id.hex()
            assert (place.memory, place.on_disk, place.peers, place.pins) == (None, False, (), 0)
        after = served.member.stats()
        for name in ("chunks_read", "bytes_read", "requests_match", "miss_absent", "miss_damaged", "refreshed"):
            assert after[name] == before[name], name
        assert [path.stat().st_mtime_ns for path in chunk_files(tmp_root)] == times
        assert len(store.control.lookup(cache, TOKENS, chunks_max=2)) == 2
        assert store.control.lookup(cache, TOKENS + 1) == []


def test_lookup_sees_memory_and_local_disk_and_what_is_dirty(tmp_path: Path) -> None:
    root = faulty()
    with working(root, write=WriteMode.BEHIND, disk=tmp_path / "disk") as (acting, served), connected(served) as store:
        eventually(lambda: not acting.stat("disk_refilling"), "the disk is taken in")
        cache, tokens = store.namespace("m", acting.cache.layout), acting.prompts.tokens(1, 3)
        with held(root):
            acting.put(1, 3)
            for place in store.control.lookup(cache, tokens):
                assert place.root is None and place.memory is not None
                assert place.memory.is_dirty and place.memory.size_bytes == acting.unit_bytes
        acting.drain()
        (first, *_) = places = store.control.lookup(cache, tokens)
        assert len(places) == 3 and first.root is not None and first.memory is not None and not first.memory.is_dirty
        cache.move(tokens, "disk").wait(WAIT_S)
        assert [(each.memory, each.on_disk) for each in store.control.lookup(cache, tokens)] == 3 * [(None, True)]


def test_lookup_counts_the_pins_that_cover_each_chunk() -> None:
    with serving() as served, connected(served) as store:
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, KV)
        cache.pin(TOKENS[: 2 * SIZE])
        cache.pin(TOKENS[: 3 * SIZE])
        assert [each.pins for each in store.control.lookup(cache, TOKENS)] == [2, 2, 1, 0]


def test_a_long_prompt_is_told_in_several_messages_up_to_the_first_chunk_that_is_nowhere() -> None:
    tokens = np.arange(700 * TINY.chunk_tokens)
    with serving() as served, connected(served) as store, raw_control(served) as stub:
        cache = store.namespace("m", TINY)
        cache.put(tokens[: 600 * TINY.chunk_tokens], kv_of(TINY, tokens[: 600 * TINY.chunk_tokens]))
        assert [each.index for each in store.control.lookup(cache, tokens)] == [*range(600)]
        request = pb.LookupRequest(namespace=cache.namespace.digest, tokens=packed(tokens))
        messages = list(stub.Lookup(request, timeout=WAIT_S))
        assert len(messages) > 1 and sum(len(each.chunks) for each in messages) == 600
        assert max(each.ByteSize() for each in messages) < 4 << 20


def test_a_foreign_client_looks_up_with_the_proto_alone() -> None:
    with serving() as served, connected(served) as store, raw_control(served) as stub:
        store.namespace("m", SMALL).put(TOKENS, KV)
        digest = store.namespace("m", SMALL).namespace.digest
        answer = list(stub.Lookup(pb.LookupRequest(namespace=digest, tokens=packed(TOKENS)), timeout=WAIT_S))
        assert [each.index for message in answer for each in message.chunks] == [0, 1, 2, 3]
        request = pb.LookupRequest(namespace=bytes(32), tokens=packed(TOKENS))
        code, _, kind = refused(lambda: list(stub.Lookup(request, timeout=WAIT_S)))
        assert (code, kind) == (grpc.StatusCode.NOT_FOUND, "UnknownNamespace")


# Tickets


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


def test_a_ticket_that_fails_says_why() -> None:
    with serving() as served, steering(served) as control:
        failed = control.clear(Selection(tenant="nobody")).wait(WAIT_S)
        assert failed.state is State.FAILED and "no namespace of this root is meant" in failed.message


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
    """A ticket that moves what is dirty to the root, and goes on as long as the root is held."""
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
            assert ended.state is State.FAILED and "not done in time" in ended.message


def test_a_ticket_that_nobody_has_is_not_found() -> None:
    with serving() as served, steering(served) as control, raw_control(served) as stub:
        with pytest.raises(NoTicket, match="kvstore tickets lists them"):
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
    """Each takes a thread for as long as its ticket goes on, which may be a day."""
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
            assert served.worker.service.gauges()["tickets_running"] == 4
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


# Limits


def test_limits_change_while_it_runs_and_say_what_they_were() -> None:
    logger = logging.getLogger("kvstore")
    level = logger.level
    try:
        with serving() as served, steering(served) as control:
            (found,) = control.set_limits({"calls_max": 100, "read_deadline_s": "7.5", "log_level": "error"}).values()
            assert value(found, "calls_max") == LimitValue(
                "calls_max", "100", "calls at once; more are refused", "64", "64"
            )
            assert (value(found, "read_deadline_s").value, value(found, "read_deadline_s").before) == ("7.5", "15")
            assert value(found, "holds_max").before == ""
            assert logger.level == logging.ERROR
            assert served.member.node.limits.read_deadline_s == 7.5
            (found,) = control.limits().values()
            assert (value(found, "calls_max").value, value(found, "calls_max").started) == ("100", "64")
    finally:
        logger.setLevel(level)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"calls_max": "100", "spare_calls_max": "9"}, "limit spare_calls_max: not one that can change"),
        ({"calls_max": "100", "holds_max": "many"}, "limit holds_max='many': expected a whole number"),
        ({"calls_max": "100", "holds_max": "1.5"}, "expected a whole number"),
        ({"calls_max": "100", "holds_max": "0"}, "limit holds_max=0: expected more than 0"),
        ({"calls_max": "100", "read_deadline_s": "nan"}, "limit read_deadline_s=nan"),
        ({"calls_max": "100", "read_deadline_s": "301"}, "a hold must outlast the read it protects"),
        ({"calls_max": "100", "behind_share": "1.1"}, "expected a share of memory, at most 1"),
        (
            {"calls_max": "100", "match_deadline_s": "1e10"},
            "limit match_deadline_s is too large: expected at most 1e+09",
        ),
        ({"calls_max": "100", "write_deadline_s": "1e300"}, "expected at most 1e+09"),
        ({"calls_max": "100", "bytes_in_flight_max": "1" + "0" * 30}, "expected at most"),
        ({"calls_max": "100", "holds_max": "9" * 4000}, "expected at most"),
        ({"calls_max": "100", "recode_bytes_per_s_max": "inf"}, "expected at most"),
        ({"calls_max": "257"}, "threads for at most 256"),
        ({"calls_max": "100", "log_level": "loud"}, "log_level='loud': expected one of debug"),
    ],
)
def test_limits_change_all_or_none(changes: dict[str, str], said: str) -> None:
    with serving() as served, steering(served) as control:
        (before,) = control.limits().values()
        (refusal,) = control.set_limits(changes).values()
        assert isinstance(refusal, InvalidRequest) and said in str(refusal)
        (after,) = control.limits().values()
        assert after == before


def test_a_changed_limit_holds_for_the_next_call() -> None:
    root = FaultyRoot(MemoryRoot(MemoryFiles()))
    with serving(root) as served, connected(served) as store, ThreadPoolExecutor(2) as threads:
        cache = store.namespace("m", SMALL)
        control = store.control
        control.set_limits({"calls_max": 1})
        hang = Hang()
        root.set_rules([Rule("stat", hang)])
        inside = threads.submit(lambda: cache.match(TOKENS))
        eventually(lambda: served.worker.service.gate.inside_count == 1, "a call is inside")
        with raw_control(served) as stub:
            request = pb.LookupRequest(namespace=cache.namespace.digest, tokens=packed(TOKENS))
            code, _, kind = refused(lambda: list(stub.Lookup(request, timeout=WAIT_S)))
            assert (code, kind) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Busy.__name__)
        control.set_limits({"calls_max": 2})
        other = threads.submit(lambda: cache.match(TOKENS))
        eventually(lambda: served.worker.service.gate.inside_count == 2, "two are")
        root.set_rules([])
        hang.release.set()
        assert inside.result() == other.result() == 0


def test_the_share_of_memory_that_waits_is_a_limit_too() -> None:
    with working(faulty()) as (acting, served), steering(served) as control:
        control.set_limits({"behind_share": 0.25, "moves_max": 5})
        assert acting.tiers.behind.bytes_max == acting.memory.size_bytes // 4
        (health,) = control.health().values()
        assert not isinstance(health, KVStoreError)
        assert health["queues"]["behind_bytes_max"] == acting.memory.size_bytes // 4


# Health


def test_health_says_in_one_answer_how_it_is() -> None:
    with working(faulty()) as (acting, served), steering(served) as control:
        (health,) = control.health().values()
        assert not isinstance(health, KVStoreError)
        assert health["healthy"] and health["problems"] == []
        assert health["worker"]["serving"] and not health["worker"]["draining"]
        assert health["root"]["answers"] and health["root"]["id"] == acting.identity.root.hex()
        assert not health["etcd"]["used"] and health["memory"]["size_bytes"] == acting.memory.size_bytes
        assert health["queues"]["calls_max"] == 64


def test_health_answers_while_the_root_hangs_and_says_so() -> None:
    root = FaultyRoot(MemoryRoot(MemoryFiles()))
    with serving(root, limits=Limits(stall_s=0.5)) as served, steering(served) as control:
        hang = Hang()
        root.set_rules([Rule("space", hang)])
        (health,) = returns(control.health).values()  # the space is told never
        root.set_rules([])
        hang.release.set()
        assert not isinstance(health, KVStoreError)
        assert not health["healthy"] and not health["root"]["answers"]
        assert "the root does not answer within 2 s" in health["problems"][0]


# Drain


def test_drain_tells_the_program_and_answers_before() -> None:
    asked: list[float | None] = []

    def on_drain(within_s: float | None) -> float:
        asked.append(within_s)
        return within_s or 30.0

    member = member_on(MemoryRoot(MemoryFiles()))
    worker = Worker(member, "127.0.0.1:0", on_drain=on_drain)
    try:
        worker.start()
        served = Served(worker, member)
        with steering(served) as control, raw_control(served) as stub:
            assert control.drain().within_s == 30.0
            assert control.drain(worker.address, within=5.0).within_s == 5.0
            assert asked == [None, 5.0]
            for within_s in (-1.0, 86_401.0, 1e300, float("nan"), float("inf")):
                request = pb.DrainRequest(within_s=within_s)
                code, _, _ = refused(lambda wrong=request: stub.Drain(wrong, timeout=WAIT_S))  # type: ignore[misc]
                assert code is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(InvalidRequest, match="is not one of"):
                control.drain("127.0.0.1:1")
        assert len(asked) == 2
    finally:
        worker.stop()
        member.close()


def test_a_worker_in_a_program_that_does_not_end_for_it_refuses_to_drain() -> None:
    with serving() as served, steering(served) as control, raw_channel(served):
        with pytest.raises(InvalidRequest, match="end that program"):
            control.drain()
        assert served.worker.is_serving


def test_which_worker_drains_must_be_said_where_there_are_several() -> None:
    with serving() as one, serving() as two, connected(one, two) as store, pytest.raises(InvalidRequest) as refusal:
        store.control.drain()
    assert one.address in str(refusal.value) and two.address in str(refusal.value)


def test_a_store_of_this_process_has_nobody_to_steer() -> None:
    from tests.node.stores import store_on

    with store_on(MemoryRoot(MemoryFiles())) as store, pytest.raises(InvalidRequest, match="connect to a worker"):
        _ = store.control


def test_reflection_lists_the_control_service(tmp_root: Path) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    with serving(tmp_root) as served, raw_channel(served) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        (answer,) = stub.ServerReflectionInfo(asked, timeout=WAIT_S)
        names = {each.name for each in answer.list_services_response.service}
    assert {"kvstore.v1.Control", "kvstore.v1.KVStore"} <= names
