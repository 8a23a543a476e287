"""Prefetch and ``evict_first`` in this process: where the chunks are afterwards, and how a prefetch ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore import Layout
from kvstore.client.cache import Cache
from kvstore.client.operation import Operation
from kvstore.core.write_mode import WriteMode
from kvstore.engine import prefetch
from kvstore.engine.settings import Limits
from kvstore.errors import InvalidRequest, StoreClosed
from kvstore.root.memory import MemoryFiles, MemoryRoot
from tests.kit.cases import for_each
from tests.kit.faulty_root import EIO, FaultyRoot, Hang, Rule
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import store_on
from tests.kit.tiers import ROOM_CHUNKS, Acting, eventually, faulty, held

WAIT_S = PATIENCE_S


def patient(root: FaultyRoot, *, limits: Limits | None = None, **settings: Any) -> Acting:
    """A node that waits as long as one does by default: a busy machine is no reason for a miss here."""
    return Acting(root, limits=limits or Limits(), **settings)


def finished(operation: Operation) -> int:
    """Tokens of a prefetch that must be done."""
    assert operation.wait(WAIT_S)
    assert operation.state == "done", operation.message
    assert (operation.done < operation.total) == bool(operation.message)
    return operation.done


def test_r2_prefetch_brings_chunks_from_the_root_into_memory() -> None:
    root = faulty()
    with patient(root, write=WriteMode.UNCACHED) as acting:
        acting.put(1, 20)
        assert not any(acting.in_memory(1, 20))
        assert finished(acting.cache.prefetch(acting.prompts.tokens(1, 24))) == 20 * acting.size
        assert all(acting.in_memory(1, 20))
        root.set_rules([Rule("open", EIO)])
        assert acting.get(1, 20) == 20, "read from memory alone"
        acting.assert_settled()


def test_r2_prefetch_of_an_unknown_prompt_is_done_with_nothing() -> None:
    with patient(faulty()) as acting:
        assert finished(acting.cache.prefetch(acting.prompts.tokens(1, 3))) == 0
        assert finished(acting.cache.prefetch([])) == 0
        acting.cache.evict_first(acting.prompts.tokens(1, 3))


def test_e2_prefetch_takes_no_space_of_held_chunks() -> None:
    with patient(faulty(), write=WriteMode.UNCACHED) as acting:
        acting.put(1, 20)
        acting.put(2, ROOM_CHUNKS - 5)
        assert finished(acting.cache.prefetch(acting.prompts.tokens(2, ROOM_CHUNKS - 5))) // acting.size == 58
        with acting.cache.hold(acting.prompts.tokens(2, ROOM_CHUNKS - 5)):
            assert finished(acting.cache.prefetch(acting.prompts.tokens(1, 20))) == 5 * acting.size
            assert all(acting.in_memory(2, ROOM_CHUNKS - 5))
        assert finished(acting.cache.prefetch(acting.prompts.tokens(1, 20))) == 20 * acting.size


def test_prefetch_lets_reads_go_first_but_not_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    root, hang = faulty(), Hang()
    with patient(root, write=WriteMode.UNCACHED) as acting:
        acting.put(1, 8)
        acting.put(2, 1)
        root.set_rules([Rule("open", hang, times=1)])
        reading = threading.Thread(target=acting.get, args=(2, 1))
        reading.start()
        assert hang.reached.wait(PATIENCE_S)
        with monkeypatch.context() as patch:
            patch.setattr(prefetch, "GIVE_WAY_MAX", 1 << 30)
            waiting = acting.cache.prefetch(acting.prompts.tokens(1, 8))
            assert not waiting.wait(0.2) and not waiting.done
            waiting.cancel()
            assert waiting.wait(WAIT_S) and waiting.state == "cancelled"
        assert finished(acting.cache.prefetch(acting.prompts.tokens(1, 8))) == 8 * acting.size, "the read still hangs"
        hang.release.set()
        reading.join(PATIENCE_S)
        assert not acting.member.node.reader.is_busy


def test_prefetch_to_disk_leaves_memory_alone(tmp_path: Path) -> None:
    root = faulty()
    with patient(root, write=WriteMode.UNCACHED, disk=tmp_path / "disk") as acting:
        acting.put(1, 12)
        eventually(lambda: not acting.stat("disk_refilling"))
        assert finished(acting.cache.prefetch(acting.prompts.tokens(1, 12), tier="disk")) == 12 * acting.size
        assert all(acting.on_disk(1, 12)) and not any(acting.in_memory(1, 12))
        root.set_rules([Rule("open", EIO)])
        assert acting.get(1, 12) == 12, "read from the disk"


def test_i1_damaged_image_never_gets_to_the_disk(tmp_path: Path) -> None:
    with patient(faulty(), disk=tmp_path / "disk") as acting:
        acting.put(1, 6)
        acting.drain()
        eventually(lambda: not acting.stat("disk_refilling"))
        acting.damage(1, 3)
        assert finished(acting.cache.prefetch(acting.prompts.tokens(1, 6), tier="disk")) == 6 * acting.size
        assert all(acting.on_disk(1, 6))
        acting.forget(1, 6)
        assert acting.get(1, 6) == 6


def test_e1_prompt_to_evict_first_goes_first_and_stays_stored() -> None:
    with patient(faulty()) as acting:
        for number in (1, 2, 3):
            acting.put(number, 20)
            acting.drain()
        acting.get(3, 20)
        acting.cache.evict_first(acting.prompts.tokens(3, 20))
        acting.put(4, 20)
        assert all(acting.in_memory(1, 20)) and all(acting.in_memory(2, 20))
        assert sum(acting.in_memory(3, 20)) <= 20 + ROOM_CHUNKS - 80
        assert acting.get(3, 20) == 20


@for_each("use", ["get", "prefetch"])
def test_e1_use_of_a_prompt_ends_its_evict_first(use: str) -> None:
    with patient(faulty()) as acting:
        for number in (1, 2, 3):
            acting.put(number, 20)
            acting.drain()
        acting.cache.evict_first(acting.prompts.tokens(3, 20))
        if use == "get":
            assert acting.get(3, 20) == 20
        else:
            assert finished(acting.cache.prefetch(acting.prompts.tokens(3, 20))) == 20 * acting.size
        acting.put(4, 20)
        assert all(acting.in_memory(3, 20)), "used last, it goes last"


def test_prompt_to_evict_first_goes_first_from_the_disk(tmp_path: Path) -> None:
    with patient(faulty(), write=WriteMode.UNCACHED, disk=tmp_path / "disk") as acting:
        eventually(lambda: not acting.stat("disk_refilling"))
        for number in (1, 2):
            acting.put(number, 100)
            finished(acting.cache.prefetch(acting.prompts.tokens(number, 100), tier="disk"))
        acting.cache.evict_first(acting.prompts.tokens(2, 100))
        acting.put(3, 80)
        finished(acting.cache.prefetch(acting.prompts.tokens(3, 80), tier="disk"))
        assert all(acting.on_disk(1, 100)) and all(acting.on_disk(3, 80))
        assert sum(acting.on_disk(2, 100)) < 100


def test_close_ends_all_prefetches() -> None:
    root = faulty()
    before = threading.active_count()
    with patient(root, write=WriteMode.UNCACHED) as acting:
        acting.put(1, 8)
        with held(root, "open"):
            operations = [acting.cache.prefetch(acting.prompts.tokens(1, 8)) for _ in range(8)]
            acting.close()
        assert all(each.wait(WAIT_S) for each in operations)
        assert {each.state.value for each in operations} <= {"cancelled", "done"}
        with pytest.raises(StoreClosed):
            acting.cache.prefetch(acting.prompts.tokens(1, 8))
    eventually(lambda: threading.active_count() <= before)


@for_each(
    "begin, message",
    [
        (lambda cache: cache.prefetch([1]), "--memory"),
        (lambda cache: cache.prefetch([1], tier="root"), "expected memory or disk"),
        (lambda cache: cache.prefetch([1], worker="127.0.0.1:1"), "has no workers"),
        (lambda cache: cache.prefetch([-1]), "item 0 is -1"),
    ],
)
def test_prefetch_without_memory_or_tier_says_what_to_do(begin: Callable[[Cache], Operation], message: str) -> None:
    with store_on(MemoryRoot(MemoryFiles())) as store:
        cache = store.namespace("m", Layout(2, 1, 4, "int8", 4))
        with pytest.raises(InvalidRequest, match=message):
            begin(cache)
        cache.evict_first([1])
