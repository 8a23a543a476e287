"""The mtime of a chunk encodes its last use, place in the prompt, count of uses and hints."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.client import Cache, Store
from kvstore.client.cache import BlockCache
from kvstore.client.local import LocalTransport
from kvstore.core.buffers import token_array
from kvstore.core.recency import DEFAULT, PRESETS, TTL_CLASSES_S, Hints, Recency, decode, quantum_of, stamp_ns
from kvstore.engine.engine import Engine
from kvstore.engine.settings import Limits
from kvstore.errors import InvalidRequest
from kvstore.format import places
from kvstore.format.keyset import ChunkKeys
from kvstore.format.places import Name
from kvstore.root.interface import Root, Stat
from kvstore.root.memory import MemoryRoot
from kvstore.root.posix import PosixRoot
from tests.kit.native_modes import PlainRoot
from tests.kit.patience import eventually
from tests.kit.stores import TINY, SetClock, kv_of, member_on
from tests.kit.workers import connected, serving

NOW_S = 1_800_000_000.0
QUANTUM_S = Limits().quantum_s
SIZE = TINY.chunk_tokens
CHUNKS = 6
TOKENS = np.arange(CHUNKS * SIZE)
"""Another branch, which shares two chunks after those that are kept."""
KEYS = [hashlib.blake2b(bytes([number]), digest_size=20).digest() for number in range(CHUNKS)]
BLOCKS = [bytes([number]) * 100 for number in range(CHUNKS)]


class Opened:
    """A store, the node behind it, and what their root says of chunks."""

    def __init__(self, store: Store, node: Engine, clock: SetClock, calls: Callable[[], int] = lambda: 0) -> None:
        """``calls`` counts those that a worker has not ended: it notes a use after its last byte is sent."""
        self.store, self.node, self.clock, self._calls = store, node, clock, calls
        self.use("m")

    def use(self, name: str) -> None:
        """Continues with a namespace, which is empty at first."""
        self.cache: Cache = self.store.namespace(name, TINY)

    def put(self, tokens: np.ndarray = TOKENS, prefix: int = 0, **hints: Any) -> None:
        kv = kv_of(TINY, tokens)[:, :, prefix:]
        assert self.cache.put(tokens, kv, prefix, **hints).tokens_present == len(tokens)
        self.settle()

    def get(self, tokens: np.ndarray = TOKENS) -> None:
        assert self.cache.get(tokens)[0] == len(tokens)
        self.settle()

    def settle(self) -> None:
        """Waits until every use is noted on the root."""
        eventually(lambda: not self._calls(), "the calls end")
        self.node.drain()

    def mtimes(self) -> list[int]:
        """The mtimes of the namespace's chunks, newest first."""
        found = []
        for folder in self.node.root.list(places.CHUNKS):
            for entry in self.node.root.list(Name(f"{places.CHUNKS}/{folder.name}")):
                parsed = places.parse_chunk(entry.name)
                if parsed is not None and parsed[1] == self.cache.namespace.id and entry.stat is not None:
                    found.append(entry.stat.mtime_ns)
        return sorted(found, reverse=True)

    def recencies(self) -> list[Recency]:
        """The recency of each chunk, first to last."""
        return sorted((decode(each, QUANTUM_S) for each in self.mtimes()), key=lambda each: each.depth)

    def hints(self) -> list[Hints]:
        return [each.hints for each in self.recencies()]

    def uses(self) -> list[int]:
        return [each.uses for each in self.recencies()]

    def used_at(self) -> list[float]:
        return [each.last_use_s for each in self.recencies()]

    def now(self) -> int:
        return quantum_of(self.clock.wall_s, QUANTUM_S)

    def pass_quanta(self, count: int = 1) -> None:
        self.settle()
        self.clock.wall_s += count * QUANTUM_S


@contextmanager
def local(root: Root, clock: SetClock | None = None) -> Iterator[Opened]:
    clock = clock or SetClock(NOW_S)
    member = member_on(root, clock=clock)
    with Store(LocalTransport(member)) as store:
        yield Opened(store, member.node, clock)


@pytest.fixture(params=["files", "python", "remote"])
def opened(request: pytest.FixtureRequest, tmp_root: Path) -> Iterator[Opened]:
    """In this process with native code and without it, or through a worker."""
    if request.param != "remote":
        with local(PosixRoot(tmp_root) if request.param == "files" else PlainRoot(tmp_root)) as made:
            yield made
        return
    clock = SetClock(NOW_S)
    with serving(MemoryRoot(), clock=clock) as served, connected(served) as store:
        yield Opened(store, served.member.node, clock, lambda: served.worker.service.gate.inside_count)


# Hints

SAID: list[tuple[dict[str, Any], Hints]] = [
    ({}, DEFAULT),
    ({"priority": 0}, Hints(0)),
    ({"priority": 100, "ttl": 1}, Hints(100, 300)),
    ({"ttl": 301.5}, Hints(35, 1_800)),
    ({"ttl": 2_592_001}, DEFAULT),
    ({"preset": "batch"}, PRESETS["batch"]),
    ({"preset": "rag", "priority": 7}, Hints(7, PRESETS["rag"].ttl_s)),
    ({"preset": "chat", "ttl": math.inf}, Hints(PRESETS["chat"].priority)),
]


def test_hints_of_a_put_are_those_of_its_chunks(opened: Opened) -> None:
    for said, kept in SAID:
        expected = [Recency(opened.now(), depth, 0, kept.priority, kept.ttl_s) for depth in range(CHUNKS)]
        opened.use(str(said))
        opened.put(**said)
        assert opened.recencies() == expected
        opened.use(f"{said} blocks")
        assert opened.cache.blocks.put(KEYS[:2], BLOCKS[:2], **said) == [True] * 2
        assert opened.cache.blocks.put(KEYS[2:], BLOCKS[2:], first=2, **said) == [True] * 4
        assert opened.recencies() == expected


def test_invalid_hints_are_refused_before_anything_is_stored(opened: Opened) -> None:
    for said in ({"priority": 101}, {"ttl": 0}, {"ttl": math.nan}, {"preset": "chats"}):
        with pytest.raises(InvalidRequest, match="expected"):
            opened.cache.put(TOKENS, kv_of(TINY, TOKENS), **said)
        with pytest.raises(InvalidRequest, match="expected"):
            opened.cache.blocks.put(KEYS, BLOCKS, **said)
        assert opened.mtimes() == []


def test_readers_renew_once_per_quantum_and_keep_the_hints(opened: Opened) -> None:
    opened.put(priority=80, ttl=7_200)
    opened.get()
    assert opened.store.stats()["refreshed"] == 0, "chunks of this quantum are not renewed"
    for uses in (1, 2, 3, 3):
        opened.pass_quanta()
        for _ in range(3):
            opened.get()
        assert opened.hints() == [Hints(80, 7_200)] * CHUNKS
        assert opened.uses() == [uses] * CHUNKS and opened.used_at() == [opened.now()] * CHUNKS
    before = opened.now()
    opened.pass_quanta()
    opened.get(TOKENS[: 3 * SIZE])
    assert opened.used_at() == [opened.now()] * 3 + [before] * 3
    assert opened.store.stats()["refreshed"] == 4 * CHUNKS + 3


@pytest.mark.parametrize("quanta", [0, 5])
def test_put_of_stored_chunks_raises_their_hints_only(opened: Opened, quanta: int) -> None:
    opened.put(preset="batch")
    opened.pass_quanta(quanta)
    opened.put(TOKENS[: 3 * SIZE])
    assert opened.hints() == [DEFAULT] * 3 + [PRESETS["batch"]] * 3
    before = opened.mtimes()
    opened.put(preset="batch")
    assert opened.hints() == [DEFAULT] * 3 + [PRESETS["batch"]] * 3
    assert all(now >= then for now, then in zip(opened.mtimes(), before, strict=True))
    assert opened.uses() == [int(quanta > 0)] * CHUNKS


def test_put_of_stored_blocks_raises_their_hints(opened: Opened) -> None:
    blocks = opened.cache.blocks
    assert blocks.put(KEYS[:2], BLOCKS[:2], priority=10) == [True, True]
    assert blocks.put(KEYS[1:3], BLOCKS[1:3], first=1, preset="rag") == [True, True]
    opened.settle()
    assert opened.hints() == [Hints(10), Hints(70, None), PRESETS["rag"]]


def test_repaired_parent_gets_the_hints_of_its_children() -> None:
    root = MemoryRoot()
    with local(root) as opened:
        opened.put(priority=90, ttl=7_200)
        address = ChunkKeys.of(opened.cache.namespace, token_array(TOKENS)).addresses[1]
        root.remove(places.chunk(address, opened.cache.namespace.id, opened.node.identity.shard_bits))
        opened.put(priority=5, ttl=300)
        assert opened.hints()[1] == Hints(5, 300)
        opened.pass_quanta()
        opened.get()
        assert opened.hints() == [Hints(90, 7_200)] * CHUNKS


def test_a_parent_that_was_put_after_its_child_counts_its_uses() -> None:
    """A slow put stamps its chunks with the time of its start; another put wrote the parent after that."""
    root = MemoryRoot()
    with local(root) as opened:
        opened.put()
        opened.pass_quanta()
        addresses = ChunkKeys.of(opened.cache.namespace, token_array(TOKENS)).addresses
        for depth, uses in ((0, 1), (1, 1), (2, 0)):
            name = places.chunk(addresses[depth], opened.cache.namespace.id, opened.node.identity.shard_bits)
            root.touch(name, stamp_ns(opened.now(), depth, uses=uses))
        opened.get(TOKENS[: 3 * SIZE])
        assert opened.uses() == [1, 1, 0, 0, 0, 0]
        opened.get()
        assert opened.uses() == [1] * CHUNKS


STEPS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(["put", "get", "wait"]),
        st.integers(1, CHUNKS),
        st.fixed_dictionaries(
            {"priority": st.none() | st.integers(0, 100), "ttl": st.none() | st.sampled_from(TTL_CLASSES_S)}
        ),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.sampled_from([0, QUANTUM_S // 2, 3 * QUANTUM_S]))
def test_parent_is_never_staler_or_worth_less_than_its_child(
    steps: list[tuple[int, str, int, dict[str, Any]]], skew_s: int
) -> None:
    """Two nodes, and the clock of one may be behind."""
    root = MemoryRoot()
    with local(root) as first, local(root, SetClock(NOW_S - skew_s)) as second:
        before: list[int] = []
        for which, action, count, hints in steps:
            at = (first, second)[which]
            if action == "wait":
                first.pass_quanta(count % 2)
                second.pass_quanta(count % 2)
            elif action == "put":
                at.put(TOKENS[: count * SIZE], **hints)
            else:
                at.get(TOKENS[: min(count, len(before)) * SIZE])
            mtimes, recencies = first.mtimes(), first.recencies()
            assert [each.depth for each in recencies] == [*range(len(mtimes))]
            assert [decode(each, QUANTUM_S) for each in mtimes] == recencies
            assert all(now >= then for now, then in zip(mtimes, before, strict=False))
            for parent, child in pairwise(recencies):
                assert parent.hints.covers(child.hints)
                assert parent.uses >= child.uses
            before = mtimes


# Renewals


def hold(blocks: BlockCache) -> None:
    with blocks.hold(KEYS):
        pass


LOOKS: dict[str, Callable[[BlockCache], object]] = {
    "match": lambda blocks: blocks.match(KEYS),
    "present": lambda blocks: blocks.present(KEYS),
    "hold": hold,
    "get": lambda blocks: blocks.get(KEYS, [bytearray(100) for _ in KEYS]),
    "put": lambda blocks: blocks.put(KEYS, BLOCKS),
}


@pytest.mark.parametrize("look", LOOKS)
def test_any_look_at_blocks_renews_them_once_per_quantum(opened: Opened, look: str) -> None:
    opened.cache.blocks.put(KEYS, BLOCKS)
    opened.pass_quanta()
    for _ in range(3):
        LOOKS[look](opened.cache.blocks)
        opened.settle()
    assert opened.recencies() == [
        Recency(opened.now(), depth, 1, DEFAULT.priority, DEFAULT.ttl_s) for depth in range(CHUNKS)
    ]
    assert opened.store.stats()["refreshed"] == CHUNKS


@pytest.mark.parametrize("reads", ["view", "layers"])
def test_reads_of_a_hold_renew_its_chunks(opened: Opened, reads: str) -> None:
    opened.put()
    opened.pass_quanta()
    with opened.cache.hold(TOKENS) as held:
        assert list(getattr(held, reads)())
    opened.settle()
    assert opened.recencies() == [
        Recency(opened.now(), depth, 1, DEFAULT.priority, DEFAULT.ttl_s) for depth in range(CHUNKS)
    ]


def test_blocks_after_a_missing_one_are_not_renewed(opened: Opened) -> None:
    opened.cache.blocks.put(KEYS[:2], BLOCKS[:2])
    opened.cache.blocks.put(KEYS[3:], BLOCKS[3:], first=3)
    before = opened.now()
    opened.pass_quanta()
    assert opened.cache.blocks.match(KEYS) == 2
    opened.settle()
    assert opened.used_at() == [opened.now()] * 2 + [before] * 3


def test_renewal_looks_again_right_before_its_touch(tmp_root: Path) -> None:
    calls: list[tuple[str, str]] = []

    class Noting(PosixRoot):
        def stat(self, name: Name) -> Stat | None:
            calls.append(("stat", threading.current_thread().name))
            return super().stat(name)

        def touch(self, name: Name, stamp_ns: int) -> bool:
            calls.append(("touch", threading.current_thread().name))
            return super().touch(name, stamp_ns)

    def renewing(opened: Opened) -> list[str]:
        calls.clear()
        opened.get()
        return [call for call, thread in calls if thread == "kvstore-refresh"]

    clock = SetClock(NOW_S)
    with local(Noting(tmp_root), clock) as first, local(Noting(tmp_root), clock) as second:
        first.put()
        clock.wall_s += QUANTUM_S
        # Both read before either renews: neither look at the read tells that there is nothing to do.
        assert renewing(first) == ["stat"] * CHUNKS + ["stat", "touch"] * CHUNKS
        assert renewing(first) == [], "what is known to be renewed costs nothing"
        calls.clear()
        second.node.refresher.used(ChunkKeys.of(first.cache.namespace, token_array(TOKENS)))
        second.settle()
        assert [call for call, _ in calls] == ["stat"] * CHUNKS
        assert first.uses() == [1] * CHUNKS, "and it is one use"


@pytest.mark.parametrize("prefix", [0, 3 * SIZE])
def test_put_that_extends_an_old_prefix_renews_it_first(tmp_root: Path, prefix: int) -> None:
    at_publish: list[list[float]] = []

    class Noting(PosixRoot):
        def publish(self, staged: Name, name: Name, *, durable: bool) -> bool:
            if name.startswith("chunks/") and len(made.mtimes()) >= 3:
                at_publish.append(made.used_at())
            return super().publish(staged, name, durable=durable)

    with local(Noting(tmp_root)) as made:
        made.put(TOKENS[: 3 * SIZE])
        made.pass_quanta(5)
        made.put(prefix=prefix)
        assert at_publish == [[made.now()] * count for count in (3, 4, 5)]
