"""Prefetch, move and release in this process: what is where afterwards, and that nobody ever waits for them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Layout
from kvstore.buffers import planes_of
from kvstore.client.cache import Cache
from kvstore.client.tickets import Ticket
from kvstore.errors import InvalidRequest, Overloaded, StoreClosed, Unavailable
from kvstore.node import moving
from kvstore.node.limits import Limits
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.tokens import token_array
from kvstore.writes import WriteMode
from tests.kit.cases import for_each
from tests.kit.faulty_root import EIO, FaultyRoot, Hang, Rule
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import store_on
from tests.kit.tiers import IN_TIME_S, QUICK, ROOM_CHUNKS, Acting, eventually, faulty, held, timed

WAIT_S = PATIENCE_S


def patient(root: FaultyRoot, *, limits: Limits | None = None, **settings: Any) -> Acting:
    """A node that waits as long as one does by default: a busy machine is no reason for a miss here."""
    return Acting(root, limits=limits or Limits(), **settings)


def finished(ticket: Ticket) -> int:
    """Tokens of a ticket that must end without an error."""
    tokens = ticket.wait(WAIT_S)
    assert ticket.done and ticket.error is None, ticket.error
    assert tokens == ticket.tokens
    return tokens


def test_r2_a_prefetch_brings_what_only_the_root_has_into_memory() -> None:
    root = faulty()
    with patient(root, write=WriteMode.UNCACHED) as acting:
        acting.put(1, 20)
        assert not any(acting.in_memory(1, 20))
        assert finished(acting.cache.prefetch(acting.prompts.tokens(1, 24))) == 20 * acting.size
        assert all(acting.in_memory(1, 20))
        root.set_rules([Rule("open", EIO)])
        assert acting.get(1, 20) == 20, "read from memory alone"
        acting.assert_settled()


def test_r2_what_is_stored_nowhere_is_a_prefetch_of_nothing() -> None:
    with patient(faulty()) as acting:
        assert finished(acting.cache.prefetch(acting.prompts.tokens(1, 3))) == 0
        assert finished(acting.cache.prefetch([])) == 0
        assert finished(acting.cache.move([1, 2], "root")) == 0
        assert finished(acting.cache.release(acting.prompts.tokens(1, 3))) == 0


def test_e2_a_prefetch_takes_no_room_from_what_is_in_use() -> None:
    with patient(faulty(), write=WriteMode.UNCACHED) as acting:
        acting.put(1, 20)
        acting.put(2, ROOM_CHUNKS - 5)
        assert finished(acting.cache.prefetch(acting.prompts.tokens(2, ROOM_CHUNKS - 5))) // acting.size == 58
        with acting.cache.hold(acting.prompts.tokens(2, ROOM_CHUNKS - 5)):
            assert finished(acting.cache.prefetch(acting.prompts.tokens(1, 20))) == 5 * acting.size
            assert all(acting.in_memory(2, ROOM_CHUNKS - 5))
        assert finished(acting.cache.prefetch(acting.prompts.tokens(1, 20))) == 20 * acting.size


def test_two_prefetches_with_a_common_beginning_both_end_with_all_of_it() -> None:
    """E4: what one of them claims the other one waits for, it does not take it for lost."""
    with patient(faulty(), write=WriteMode.UNCACHED) as acting:
        acting.put(1, 30)
        tickets = [acting.cache.prefetch(acting.prompts.tokens(1, count)) for count in (30, 20, 30, 10)]
        assert [finished(ticket) // acting.size for ticket in tickets] == [30, 20, 30, 10]


def test_a_prefetch_lets_reads_under_way_go_first_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    root, hang = faulty(), Hang()
    with patient(root, write=WriteMode.UNCACHED) as acting:
        acting.put(1, 8)
        acting.put(2, 1)
        root.set_rules([Rule("open", hang, times=1)])
        reading = threading.Thread(target=acting.get, args=(2, 1))
        reading.start()
        assert hang.reached.wait(PATIENCE_S)
        with monkeypatch.context() as patch:
            patch.setattr(moving, "GIVE_WAY_MAX", 1 << 30)
            waiting = acting.cache.prefetch(acting.prompts.tokens(1, 8))
            assert waiting.wait(0.2) == 0 and not waiting.done
            waiting.cancel()
            eventually(lambda: waiting.done)
        assert finished(acting.cache.prefetch(acting.prompts.tokens(1, 8))) == 8 * acting.size, "the read still hangs"
        hang.release.set()
        reading.join(PATIENCE_S)
        assert not acting.member.node.reads.is_busy


def test_what_nobody_waits_for_any_more_or_what_lanes_are_done_with_delays_no_prefetch() -> None:
    with patient(faulty(), write=WriteMode.UNCACHED) as acting:
        acting.put(1, 8)
        node, tokens = acting.member.node, acting.prompts.tokens(1, 8)
        out = np.empty_like(acting.prompts.kv(1, 8))
        hold = node.hold(node.chains.of(acting.cache.namespace, token_array(tokens)))
        done = node.begin_read(hold, 0, 8, planes_of(out, acting.prompts.layout))
        eventually(lambda: not node.reads.is_busy)
        dropped = weakref.ref(done)
        del done
        gc.collect()
        assert dropped() is None and not node.reads.is_busy
        node.holds.release(hold)


def test_a_prefetch_to_the_disk_leaves_memory_alone(tmp_path: Path) -> None:
    root = faulty()
    with patient(root, write=WriteMode.UNCACHED, disk=tmp_path / "disk") as acting:
        acting.put(1, 12)
        eventually(lambda: not acting.stat("disk_refilling"))
        assert finished(acting.cache.prefetch(acting.prompts.tokens(1, 12), tier="disk")) == 12 * acting.size
        assert all(acting.on_disk(1, 12)) and not any(acting.in_memory(1, 12))
        root.set_rules([Rule("open", EIO)])
        assert acting.get(1, 12) == 12, "read from the disk"


def test_i1_a_wrong_image_never_gets_to_the_disk(tmp_path: Path) -> None:
    with patient(faulty(), disk=tmp_path / "disk") as acting:
        acting.put(1, 6)
        acting.drain()
        eventually(lambda: not acting.stat("disk_refilling"))
        acting.damage(1, 3)
        assert finished(acting.cache.prefetch(acting.prompts.tokens(1, 6), tier="disk")) == 6 * acting.size
        assert all(acting.on_disk(1, 6))
        acting.forget(1, 6)
        assert acting.get(1, 6) == 6


def test_a_move_to_the_disk_takes_it_out_of_memory(tmp_path: Path) -> None:
    root = faulty()
    with patient(root, disk=tmp_path / "disk") as acting:
        eventually(lambda: not acting.stat("disk_refilling"))
        acting.put(1, 12)
        assert finished(acting.cache.move(acting.prompts.tokens(1, 12), "disk")) == 12 * acting.size
        assert all(acting.on_disk(1, 12)) and not any(acting.in_memory(1, 12))
        assert all(acting.on_root(1, 12)), "E3: what is dirty reaches the root before it goes"
        assert acting.get(1, 12) == 12


def test_e3_a_move_to_the_root_waits_until_it_is_written_and_takes_it_away_everywhere_else(tmp_path: Path) -> None:
    root = faulty()
    with patient(root, disk=tmp_path / "disk", limits=replace(QUICK, write_deadline_s=10.0)) as acting:
        eventually(lambda: not acting.stat("disk_refilling"))
        with held(root):
            acting.put(1, 8)
            finished(acting.cache.prefetch(acting.prompts.tokens(1, 8), tier="disk"))
            ticket = acting.cache.move(acting.prompts.tokens(1, 8), "root")
            assert ticket.wait(0.3) == 0 and not ticket.done
            assert all(acting.in_memory(1, 8)) and all(acting.on_disk(1, 8))
        assert finished(ticket) == 8 * acting.size
        assert all(acting.on_root(1, 8))
        assert not any(acting.in_memory(1, 8)) and not any(acting.on_disk(1, 8))
        assert acting.get(1, 8) == 8
        acting.assert_settled()


def test_w5_a_move_to_the_root_writes_what_the_root_lost() -> None:
    with patient(faulty()) as acting:
        acting.put(1, 6)
        acting.drain()
        acting.lose(1, 4, 2)
        assert finished(acting.cache.move(acting.prompts.tokens(1, 6), "root")) == 6 * acting.size
        assert all(acting.on_root(1, 6)) and acting.get(1, 6) == 6


def test_e1_what_other_prompts_continue_and_what_is_held_stays_in_memory() -> None:
    with patient(faulty()) as acting:
        acting.put(1, 6)
        beginning = acting.prompts.tokens(1, 3)
        other = np.concatenate((beginning, np.arange(acting.size) + 77_000_000))
        kv = np.zeros(acting.cache.layout.shape(len(other)), acting.cache.layout.numpy_dtype)
        kv[:, :, : len(beginning)] = acting.prompts.kv(1, 3)
        acting.cache.put(other, kv)
        assert finished(acting.cache.move(acting.prompts.tokens(1, 6), "root")) == 6 * acting.size
        assert acting.in_memory(1, 6) == [True] * 3 + [False] * 3
        with acting.cache.hold(acting.prompts.tokens(1, 3)):
            finished(acting.cache.move(other, "root"))
            assert acting.in_memory(1, 3) == [True] * 3
        finished(acting.cache.move(other, "root"))
        assert acting.in_memory(1, 3) == [False] * 3
        assert acting.get(1, 6) == 6


def test_e1_what_was_released_goes_first_and_nothing_is_lost() -> None:
    with patient(faulty()) as acting:
        for number in (1, 2, 3):
            acting.put(number, 20)
            acting.drain()
        acting.get(3, 20)
        assert finished(acting.cache.release(acting.prompts.tokens(3, 20))) == 20 * acting.size
        acting.put(4, 20)
        assert all(acting.in_memory(1, 20)) and all(acting.in_memory(2, 20))
        assert sum(acting.in_memory(3, 20)) <= 20 + ROOM_CHUNKS - 80
        assert acting.get(3, 20) == 20


@for_each("use", ["get", "prefetch"])
def test_e1_a_use_ends_a_release(use: str) -> None:
    with patient(faulty()) as acting:
        for number in (1, 2, 3):
            acting.put(number, 20)
            acting.drain()
        finished(acting.cache.release(acting.prompts.tokens(3, 20)))
        if use == "get":
            assert acting.get(3, 20) == 20
        else:
            assert finished(acting.cache.prefetch(acting.prompts.tokens(3, 20))) == 20 * acting.size
        acting.put(4, 20)
        assert all(acting.in_memory(3, 20)), "used last, it goes last"


def test_a_released_prompt_goes_first_from_the_disk_too(tmp_path: Path) -> None:
    with patient(faulty(), write=WriteMode.UNCACHED, disk=tmp_path / "disk") as acting:
        eventually(lambda: not acting.stat("disk_refilling"))
        for number in (1, 2):
            acting.put(number, 100)
            finished(acting.cache.prefetch(acting.prompts.tokens(number, 100), tier="disk"))
        assert finished(acting.cache.release(acting.prompts.tokens(2, 100))) == 100 * acting.size
        acting.put(3, 80)
        finished(acting.cache.prefetch(acting.prompts.tokens(3, 80), tier="disk"))
        assert all(acting.on_disk(1, 100)) and all(acting.on_disk(3, 80))
        assert sum(acting.on_disk(2, 100)) < 100


def test_cancelling_ends_it_in_time_and_takes_nothing_away() -> None:
    root = faulty()
    with patient(root, write=WriteMode.UNCACHED, limits=QUICK) as acting:
        acting.put(1, 8)
        with held(root, "open"):
            ticket = acting.cache.prefetch(acting.prompts.tokens(1, 8))
            assert ticket.wait(0.2) == 0 and not ticket.done
            ticket.cancel()
            assert not ticket.done, "it waits for nobody"
            ticket.wait(WAIT_S)
            assert ticket.done and ticket.tokens == 0
        assert acting.get(1, 8) == 8


def test_a_ticket_as_a_context_is_cancelled() -> None:
    root = faulty()
    with patient(root, write=WriteMode.UNCACHED, limits=QUICK) as acting:
        acting.put(1, 8)
        with held(root, "open"):
            with acting.cache.prefetch(acting.prompts.tokens(1, 8)) as ticket:
                assert not ticket.done
            ticket.wait(WAIT_S)
            assert ticket.done and ticket.tokens < 8 * acting.size
        with acting.cache.prefetch(acting.prompts.tokens(1, 8)) as ticket:
            assert finished(ticket) == 8 * acting.size


def test_too_many_at_once_are_refused_and_those_that_were_cancelled_make_room() -> None:
    root = faulty()
    with patient(root, write=WriteMode.UNCACHED, limits=replace(QUICK, moves_max=6)) as acting:
        acting.put(1, 8)
        tokens = acting.prompts.tokens(1, 8)
        with held(root, "open"):
            tickets = [acting.cache.prefetch(tokens) for _ in range(6)]
            with pytest.raises(Overloaded, match="6 prefetches and moves are not done yet"):
                acting.cache.prefetch(tokens)
            tickets[-1].cancel()
            assert tickets[-1].done, "nobody had begun it"
            tickets.append(acting.cache.prefetch(tokens))
            acting.member.adjust(replace(QUICK, moves_max=7))
            tickets.append(acting.cache.prefetch(tokens))
            with pytest.raises(Overloaded, match="7 prefetches and moves are not done yet"):
                acting.cache.prefetch(tokens)
        for ticket in tickets:
            ticket.wait(WAIT_S)
        assert all(ticket.done for ticket in tickets)
        assert finished(acting.cache.prefetch(tokens)) == 8 * acting.size


def test_past_its_deadline_it_ends_where_it_is() -> None:
    root = faulty()
    limits = replace(QUICK, move_deadline_s=0.4, write_deadline_s=10.0)
    with patient(root, limits=limits) as acting:
        with held(root):
            acting.put(1, 8)
            ticket = acting.cache.move(acting.prompts.tokens(1, 8), "root")
            assert timed(lambda: ticket.wait(WAIT_S)) < IN_TIME_S
            assert ticket.done and isinstance(ticket.error, Unavailable) and "not done in time" in str(ticket.error)
            assert all(acting.in_memory(1, 8)), "nothing goes that is nowhere else"


def test_a_root_that_fails_ends_it_without_an_error_to_anybody_else() -> None:
    root = faulty()
    with patient(root, write=WriteMode.UNCACHED) as acting:
        acting.put(1, 8)
        root.set_rules([Rule("open", EIO)])
        ticket = acting.cache.prefetch(acting.prompts.tokens(1, 8))
        assert ticket.wait(WAIT_S) == 0 and ticket.done
        root.set_rules([])
        assert finished(acting.cache.prefetch(acting.prompts.tokens(1, 8))) == 8 * acting.size


def test_closing_ends_all_of_them() -> None:
    root = faulty()
    before = threading.active_count()
    with patient(root, write=WriteMode.UNCACHED) as acting:
        acting.put(1, 8)
        with held(root, "open"):
            tickets = [acting.cache.prefetch(acting.prompts.tokens(1, 8)) for _ in range(8)]
            acting.close()
        for ticket in tickets:
            ticket.wait(WAIT_S)
            assert ticket.done
        with pytest.raises(StoreClosed):
            acting.cache.prefetch(acting.prompts.tokens(1, 8))
    eventually(lambda: threading.active_count() <= before)


@for_each(
    "ask, said",
    [
        (lambda cache: cache.prefetch([1]), "--memory"),
        (lambda cache: cache.move([1], "root"), "--memory"),
        (lambda cache: cache.release([1]), "--memory"),
        (lambda cache: cache.prefetch([1], tier="root"), "expected memory or disk"),
        (lambda cache: cache.move([1], "peers"), "expected one of memory, disk, root"),
        (lambda cache: cache.prefetch([-1]), "out of range"),
    ],
)
def test_what_cannot_be_done_says_what_to_do(ask: Callable[[Cache], Ticket], said: str) -> None:
    with store_on(MemoryRoot(MemoryFiles())) as store:
        cache = store.namespace("m", Layout(2, 1, 4, "int8", 4))
        with pytest.raises(InvalidRequest, match=said):
            ask(cache)


def test_a_node_without_a_disk_says_so() -> None:
    with patient(faulty()) as acting:
        with pytest.raises(InvalidRequest, match="--disk"):
            acting.cache.prefetch(acting.prompts.tokens(1, 1), tier="disk")
        with pytest.raises(InvalidRequest, match="timeout=-1"):
            acting.cache.prefetch(acting.prompts.tokens(1, 1)).wait(-1)
