"""The blocks of one prompt age as its chunks do: the last ones go first, whoever puts, reads or only looks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.client.cache import BlockCache
from kvstore.core.recency import decode, quantum_of, stamp_ns
from kvstore.engine.settings import Limits
from kvstore.errors import InvalidRequest
from tests.kit.native_modes import opened
from tests.kit.stores import TINY, SetClock, chunk_files, fresh, member_of, store_on

NOW_S = 1_800_000_000.0
QUANTUM_S = Limits().quantum_s
COUNT = 6
KEYS = [hashlib.blake2b(bytes([number]), digest_size=20).digest() for number in range(COUNT)]
BLOCKS = [bytes([number]) * 100 for number in range(COUNT)]


def stamps(root: Path) -> list[int]:
    """The blocks' mtimes in the order of the prompt: each block has bytes of its own."""
    found = {file.read_bytes()[-1]: file.stat().st_mtime_ns for file in chunk_files(root)}
    return [found[number] for number in sorted(found)]


def expected(now_s: float, uses: int = 0, depths: range = range(COUNT)) -> list[int]:
    return [stamp_ns(quantum_of(now_s, QUANTUM_S), depth, uses=uses) for depth in depths]


def buffers(count: int = COUNT) -> list[bytearray]:
    return [bytearray(100) for _ in range(count)]


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_a_put_stamps_blocks_with_their_place_in_the_prompt(tmp_root: Path, native: bool) -> None:
    with opened(tmp_root, native=native) as store:
        blocks = store.namespace("m", TINY).blocks
        assert blocks.put(KEYS[:2], BLOCKS[:2]) == [True] * 2
        assert blocks.put(KEYS[2:], BLOCKS[2:], first=2) == [True] * 4
    assert [decode(each, QUANTUM_S).depth for each in stamps(tmp_root)] == list(range(COUNT))


Look = Callable[[BlockCache], object]


def hold(blocks: BlockCache) -> None:
    with blocks.hold(KEYS):
        pass


@pytest.mark.parametrize(
    "look",
    [
        lambda blocks: blocks.match(KEYS),
        lambda blocks: blocks.present(KEYS),
        hold,
        lambda blocks: blocks.get(KEYS, buffers()),
        lambda blocks: blocks.put(KEYS, BLOCKS),
    ],
    ids=["match", "present", "hold", "get", "put"],
)
def test_who_asks_for_a_prompt_renews_all_of_it_once_in_a_quantum(tmp_root: Path, look: Look) -> None:
    clock = SetClock(NOW_S)
    with store_on(tmp_root, clock=clock) as store:
        blocks = store.namespace("m", TINY).blocks
        blocks.put(KEYS, BLOCKS)
        clock.wall_s += QUANTUM_S
        for _ in range(3):
            look(blocks)
            member_of(store).node.drain()
        assert stamps(tmp_root) == expected(clock.wall_s, uses=1)
        assert store.stats()["refreshed"] == COUNT


def test_what_is_missing_is_not_renewed_and_ends_a_match(tmp_root: Path) -> None:
    clock = SetClock(NOW_S)
    with store_on(tmp_root, clock=clock) as store:
        blocks = store.namespace("m", TINY).blocks
        blocks.put(KEYS[:2], BLOCKS[:2])
        blocks.put(KEYS[3:], BLOCKS[3:], first=3)
        clock.wall_s += QUANTUM_S
        assert blocks.match(KEYS) == 2
        member_of(store).node.drain()
    now, before = expected(clock.wall_s, uses=1), expected(NOW_S)
    assert stamps(tmp_root) == [*now[:2], *before[3:]]


def test_a_place_that_is_none_is_refused(tmp_root: Path) -> None:
    wrong: tuple[Any, ...] = (-1, 1 << 32, 1.5, "2", None)
    for first in wrong:
        root = fresh(tmp_root)
        with store_on(root) as store, pytest.raises(InvalidRequest, match="first="):
            store.namespace("m", TINY).blocks.put(KEYS, BLOCKS, first=first)
