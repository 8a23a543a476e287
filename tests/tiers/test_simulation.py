"""Random operations of several threads on one store with little memory and a small disk, while things fail.

Every byte read is compared with what was put; limits are kept all the time; at the end nothing is referred to, leased,
dirty or waiting, and all room is given back (MEMORY.md, I1, I2, A1, E1 to E4, R1 to R3, W1 to W3, L1). Each run has a
seed; threads make its order different each time.
"""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.errors import HoldBroken, KVStoreError
from kvstore.hints import Hints
from kvstore.node.settings import Limits
from kvstore.root.posix import PosixRoot
from kvstore.writes import WriteMode
from tests.kit.descriptors import open_before, open_now
from tests.kit.faulty_root import EIO, ENOSPC, Delay, FaultyRoot, Flipped, Lost, Missing, Rule, Torn
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import same
from tests.kit.tiers import Acting, eventually, faulty, on_posix, together

PROMPTS = 24
CHUNKS = 12
BLOCKS = 40
THREADS = 4
VIEWS_MAX = 6
LIMITS = Limits(
    match_deadline_s=2.0, read_deadline_s=3.0, write_deadline_s=3.0, stall_s=2.0, behind_give_up_s=2.0, flush_s=20.0
)
FAULTS = [
    Rule("stage", EIO, probability=0.02),
    Rule("stage", ENOSPC, probability=0.02),
    Rule("stage", Torn(), probability=0.02),
    Rule("stage", Delay(0.01), probability=0.2),
    Rule("publish", EIO, probability=0.02),
    Rule("open", EIO, probability=0.02),
    Rule("open", Missing(), probability=0.02),
    Rule("open", Lost(), probability=0.01),
    Rule("look", Missing(), probability=0.02),
    Rule("stat", EIO, probability=0.02),
    Rule("read", Flipped(9_000), probability=0.03),
    Rule("read", Delay(0.01), probability=0.1),
    Rule("touch", EIO, probability=0.05),
]


class Actor:
    """One thread of a run, with randomly drawn actions."""

    def __init__(
        self, node: Acting, seed: int, goes_on: Callable[[], bool], done: Counter[str], breaks: Callable[..., None]
    ) -> None:
        self._node = node
        self._random = random.Random(seed)
        self._goes_on = goes_on
        self._done = done
        self._breaks = breaks
        self._views: list[tuple[int, list[npt.NDArray[Any]]]] = []

    def __call__(self) -> None:
        actions = {
            self.put: 30,
            self.get: 40,
            self.hold: 8,
            self.view: 8,
            self.layers: 4,
            self.put_blocks: 8,
            self.get_blocks: 8,
            self.hurt: 6,
            self.check: 10,
            self.demote: 6,
            self.clear: 0.2,
        }
        while self._goes_on():
            (action,) = self._random.choices([*actions], [*actions.values()])
            try:
                action()
                self._done[action.__name__] += 1
            except KVStoreError:
                self._done["refused"] += 1
        self.check_views()
        self._views.clear()

    def drawn(self) -> tuple[int, int]:
        """A prompt, some more often than others, and how many chunks of it."""
        return min(int(self._random.expovariate(0.15)), PROMPTS - 1), self._random.randint(1, CHUNKS)

    def put(self) -> None:
        number, chunks = self.drawn()
        first = self._random.choice([0, 0, self._random.randint(0, chunks)])
        write = self._random.choice([None, None, *WriteMode])
        hints = Hints(self._random.choice([5, 20, 35, 35, 60]))
        result = self._node.put(number, chunks, first, write=write, hints=hints)
        assert 0 <= result.tokens_present <= chunks * self._node.size

    def get(self) -> None:
        number, chunks = self.drawn()
        self._done["hits"] += self._node.get(number, chunks)

    def hold(self) -> None:
        number, chunks = self.drawn()
        with self._node.cache.hold(self._node.prompts.tokens(number, chunks)) as hold:
            if self._random.random() < 0.5:
                self.put()
            out = np.empty(self._node.cache.layout.shape(hold.tokens), self._node.cache.layout.numpy_dtype)
            count = hold.read_into(out)
            assert same(out[:, :, :count], self._node.prompts.kv(number, chunks)[:, :, :count])

    def view(self) -> None:
        """Keeps views over later actions. They are of every third prompt, which is never damaged."""
        number, chunks = self.drawn()
        number -= number % 3
        with self._node.cache.hold(self._node.prompts.tokens(number, chunks)) as hold:
            self._views.append((number, hold.view()))
        self.check_views()
        while len(self._views) > VIEWS_MAX or (self._views and self._random.random() < 0.3):
            del self._views[self._random.randrange(len(self._views))]

    def check_views(self) -> None:
        size = self._node.size
        for number, views in self._views:
            kv = self._node.prompts.kv(number, CHUNKS)
            for index, view in enumerate(views):
                assert same(view, kv[:, :, index * size : (index + 1) * size]), "a view changed"

    def layers(self) -> None:
        number, chunks = self.drawn()
        kv = self._node.prompts.kv(number, chunks)
        with self._node.cache.hold(self._node.prompts.tokens(number, chunks)) as hold, suppress(HoldBroken):
            for layer, k, v in hold.layers():
                assert same(k, kv[layer, 0, : len(k)]) and same(v, kv[layer, 1, : len(v)])

    def put_blocks(self) -> None:
        keys, blocks = self.blocks()
        stored = self._node.cache.blocks.put(keys, blocks)
        assert len(stored) == len(keys)

    def get_blocks(self) -> None:
        keys, blocks = self.blocks()
        buffers = [bytearray(len(block)) for block in blocks]
        for there, buffer, block in zip(self._node.cache.blocks.get(keys, buffers), buffers, blocks, strict=True):
            assert not there or buffer == block
            self._done["block_hits"] += there

    def blocks(self) -> tuple[list[bytes], list[bytes]]:
        numbers = self._random.sample(range(BLOCKS), self._random.randint(1, 6))
        return [number.to_bytes(16, "big") for number in numbers], [
            bytes([number + 1]) * (20_000 + 7_001 * number) for number in numbers
        ]

    def hurt(self) -> None:
        """Flips a bit of a chunk in memory, or breaks a lower tier."""
        number, chunks = self.drawn()
        if number % 3 == 0:
            return self._breaks(self._random, number, chunks - 1)
        with self._node.memory.refer(self._node.chain(number, chunks), chunks - 1, 1) as slots:
            for entry in slots.referred:
                self._node.memory.arena.memory[entry.offset + self._random.randrange(entry.size_bytes)] ^= 4
        return None

    def check(self) -> None:
        """A1, W1, L1 and the disk's bound."""
        stats = self._node.store.stats()
        size_bytes = self._node.memory.size_bytes
        assert stats["memory_held_bytes"] <= size_bytes
        assert stats["behind_bytes"] <= size_bytes // 2 and stats["memory_leased_bytes"] <= size_bytes // 2
        assert 0 <= stats["memory_referenced_bytes"] <= size_bytes
        assert stats["disk_held_bytes"] <= stats["disk_bytes_max"]

    def demote(self) -> None:
        """Demotes more often than the node does by itself: memory turns over quickly here."""
        self._node.tiers.demote_once()

    def clear(self) -> None:
        self._node.cache.clear()


def run(
    node: Acting,
    seed: int,
    seconds: float,
    breaks: Callable[..., None],
    is_enough: Callable[[], bool] = lambda: True,
) -> Counter[str]:
    """Runs for a number of seconds, and checks the invariants afterwards.

    A busy machine does little in that time: then it goes on until every wanted event has happened.
    """
    # Damage is rare: a short run may see none.
    rare = ("memory_damaged",) if seconds > 5 else ()
    shown = ("memory_evicted", "memory_demoted", "disk_hits", "behind_written", *rare)
    began_s = time.monotonic()

    def goes_on() -> bool:
        passed_s = time.monotonic() - began_s
        if not seconds <= passed_s < PATIENCE_S:
            return passed_s < seconds
        return not (is_enough() and done["hits"] and done["block_hits"] and all(map(node.stat, shown)))

    for number in range(PROMPTS):
        node.prompts.kv(number, CHUNKS)
    done: Counter[str] = Counter()
    together(*(Actor(node, seed * 100 + thread, goes_on, done, breaks) for thread in range(THREADS)))
    if isinstance(node.root, FaultyRoot):
        node.root.set_rules([])
    gc.collect()
    node.drain()
    node.assert_settled()
    for number in range(PROMPTS):
        node.get(number, CHUNKS)
    node.cache.clear()
    # A chunk that is being demoted goes once that has ended.
    eventually(lambda: not any(map(node.stat, ("memory_chunks", "memory_held_bytes", "disk_entries"))))
    assert node.memory.free_bytes == node.memory.size_bytes
    for number in range(PROMPTS):
        assert node.get(number, CHUNKS) == 0
    assert done["hits"] > 0 and done["block_hits"] > 0
    stats = node.store.stats()
    for what in shown:
        assert stats[what] > 0, what
    return done


def nothing(*_: object) -> None:
    """Does nothing: the root and disk of the test fail by themselves."""


def seeds(fast: int, slow: int) -> list[Any]:
    return [
        *(pytest.param(seed, 1.5, id=f"{seed}") for seed in range(fast)),
        *(pytest.param(seed, 4.0, id=f"{seed}-long", marks=pytest.mark.slow) for seed in range(100, 100 + slow)),
    ]


@pytest.mark.parametrize(("seed", "seconds"), seeds(1, 1))
def test_a_root_that_fails(tmp_root: Path, seed: int, seconds: float) -> None:
    root = faulty()
    with Acting(root, disk=tmp_root / "disk", limits=LIMITS) as node:
        root.set_rules(FAULTS)
        run(node, seed, seconds, nothing, lambda: len(root.struck) >= 8)
        assert len(root.struck) >= 8


@pytest.mark.parametrize(("seed", "seconds"), seeds(1, 1))
def test_files_that_are_lost_and_damaged(tmp_root: Path, seed: int, seconds: float) -> None:
    """By native code, if there is any; the files are changed by others, on the root and on the disk."""
    descriptors = open_before()
    root = on_posix(tmp_root / "root")
    with Acting(root, disk=tmp_root / "disk", limits=LIMITS) as node:

        def breaks(chosen: random.Random, number: int, index: int) -> None:
            folder = tmp_root / chosen.choice(["root", "disk"])
            address = node.chain(number, index + 1).addresses[index]
            for path in folder.rglob(f"{address.hex()}*"):
                with suppress(OSError):
                    if chosen.random() < 0.5:
                        path.unlink()
                    else:
                        replace_damaged(path, chosen.randrange(node.unit_bytes))

        assert isinstance(root, PosixRoot)
        run(node, seed, seconds, breaks)
    gc.collect()
    eventually(lambda: open_now() <= descriptors)


def replace_damaged(path: Path, at: int) -> None:
    """Puts another file in its place, with one bit flipped: an open or mapped file stays right."""
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1
    other = path.with_name(f"{path.name}.{time.monotonic_ns()}")
    other.write_bytes(content)
    other.replace(path)
