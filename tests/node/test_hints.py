"""Hints from a put to the mtimes on the root, over a node in this process and over a worker alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.client import Cache, Store
from kvstore.client.local import LocalTransport
from kvstore.core.address import block_address
from kvstore.core.buffers import Pieces, token_array
from kvstore.core.recency import DEFAULT, NS_PER_S, PRESETS, TICK_S, TTL_CLASSES_S, Hints, Recency, decode, quantum_of
from kvstore.engine.engine import Engine
from kvstore.engine.settings import Limits
from kvstore.errors import InvalidRequest
from kvstore.format.keyset import ChunkKeys
from kvstore.format.places import Name, chunk
from kvstore.root.memory import MemoryFiles, MemoryRoot
from tests.kit.patience import eventually
from tests.kit.stores import TINY, SetClock, kv_of, member_on
from tests.kit.workers import connected, serving

NOW_S = 1_800_000_000.0
QUANTUM_S = Limits().quantum_s
SIZE = TINY.chunk_tokens
CHUNKS = 6
TOKENS = np.arange(CHUNKS * SIZE)
KV = kv_of(TINY, TOKENS)


class CountingRoot(MemoryRoot):
    """A memory root that keeps mtimes in grains of ``grain_ns``, and records touches."""

    def __init__(self, grain_ns: int = 1) -> None:
        super().__init__(MemoryFiles())
        self.grain_ns = grain_ns
        self.touched: list[str] = []

    def stage(self, name: Name, pieces: Pieces, *, stamp_ns: int, durable: bool) -> None:
        super().stage(name, pieces, stamp_ns=stamp_ns // self.grain_ns * self.grain_ns, durable=durable)

    def touch(self, name: Name, stamp_ns: int) -> bool:
        self.touched.append(name)
        return super().touch(name, stamp_ns // self.grain_ns * self.grain_ns)


class Opened:
    """A store, the node behind it, and what their root says of chunks."""

    def __init__(
        self, store: Store, node: Engine, root: CountingRoot, clock: SetClock, calls: Callable[[], int] = lambda: 0
    ) -> None:
        """``calls`` counts those that a worker has not ended: it notes a use after its last byte is sent."""
        self.node, self.root, self.clock, self._calls, self._store = node, root, clock, calls, store
        self.use("m")

    def use(self, name: str) -> None:
        """Goes on with a namespace, which is empty at first."""
        self.cache: Cache = self._store.namespace(name, TINY)

    def put(self, count: int = CHUNKS, prefix: int = 0, **hints: Any) -> None:
        """Puts the first ``count`` chunks, ``prefix`` of them by name only."""
        kv = KV[:, :, prefix * SIZE : count * SIZE]
        assert self.cache.put(TOKENS[: count * SIZE], kv, prefix * SIZE, **hints).tokens_present == count * SIZE
        self.settle()

    def get(self, count: int = CHUNKS) -> None:
        assert self.cache.get(TOKENS[: count * SIZE])[0] == count * SIZE
        self.settle()

    def settle(self) -> None:
        """Waits until every use is noted on the root."""
        eventually(lambda: not self._calls(), "the calls end")
        self.node.drain()

    def name(self, index: int) -> Name:
        """The name of a chunk of the prompt."""
        namespace = self.cache.namespace
        address = ChunkKeys.of(namespace, token_array(TOKENS)).addresses[index]
        return chunk(address, namespace.id, self.node.identity.shard_bits)

    def mtimes(self) -> list[int]:
        stats = [self.root.stat(self.name(index)) for index in range(CHUNKS)]
        return [stat.mtime_ns for stat in stats if stat]

    def recencies(self) -> list[Recency]:
        """The recency of each chunk that is there, first to last."""
        return [decode(mtime_ns, QUANTUM_S) for mtime_ns in self.mtimes()]

    def hints(self) -> list[Hints]:
        return [each.hints for each in self.recencies()]

    def uses(self) -> list[int]:
        return [each.uses for each in self.recencies()]

    def block(self, key: bytes) -> Recency:
        namespace = self.cache.namespace
        stat = self.root.stat(chunk(block_address(namespace, key), namespace.id, self.node.identity.shard_bits))
        assert stat
        return decode(stat.mtime_ns, QUANTUM_S)

    def pass_quanta(self, count: int = 1) -> None:
        self.clock.wall_s += count * QUANTUM_S


@pytest.fixture
def root() -> CountingRoot:
    return CountingRoot()


@pytest.fixture(params=["local", "remote"])
def opened(request: pytest.FixtureRequest, root: CountingRoot) -> Iterator[Opened]:
    clock = SetClock(NOW_S)
    if request.param == "local":
        member = member_on(root, clock=clock)
        with Store(LocalTransport(member)) as store:
            yield Opened(store, member.node, root, clock)
    else:
        with serving(root, clock=clock) as served, connected(served) as store:
            yield Opened(store, served.member.node, root, clock, lambda: served.worker.service.gate.inside_count)


def local(root: CountingRoot) -> tuple[Store, Opened]:
    clock = SetClock(NOW_S)
    member = member_on(root, clock=clock)
    store = Store(LocalTransport(member))
    return store, Opened(store, member.node, root, clock)


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


def test_a_put_says_how_long_its_chunks_are_worth_keeping(opened: Opened) -> None:
    quantum = quantum_of(NOW_S, QUANTUM_S)
    for said, kept in SAID:
        opened.use(str(said))
        opened.put(**said)
        assert opened.recencies() == [Recency(quantum, depth, 0, kept.priority, kept.ttl_s) for depth in range(CHUNKS)]
        opened.cache.blocks.put([b"k" * 16], [b"block"], **said)
        assert opened.block(b"k" * 16) == Recency(quantum, 0, 0, kept.priority, kept.ttl_s)


def test_wrong_hints_are_refused_before_anything_is_stored(opened: Opened) -> None:
    for said in ({"priority": 101}, {"ttl": 0}, {"ttl": math.nan}, {"preset": "chats"}):
        with pytest.raises(InvalidRequest, match="expected"):
            opened.cache.put(TOKENS, KV, **said)
        with pytest.raises(InvalidRequest, match="expected"):
            opened.cache.blocks.put([b"k" * 16], [b"block"], **said)
        assert opened.mtimes() == []


def test_readers_keep_the_hints_and_count_uses(opened: Opened) -> None:
    opened.put(priority=80, ttl=7_200)
    for uses in (1, 2, 3, 3):
        opened.pass_quanta()
        opened.get()
        assert opened.hints() == [Hints(80, 7_200)] * CHUNKS
        assert opened.uses() == [uses] * CHUNKS
        assert [each.depth for each in opened.recencies()] == list(range(CHUNKS))


@pytest.mark.parametrize("quanta", [0, 5])
def test_a_put_that_finds_its_chunks_raises_their_hints_and_never_lowers_them(opened: Opened, quanta: int) -> None:
    opened.put(preset="batch")
    opened.pass_quanta(quanta)
    opened.put(3)
    assert opened.hints() == [DEFAULT] * 3 + [PRESETS["batch"]] * 3
    before = opened.mtimes()
    opened.put(preset="batch")
    assert opened.hints() == [DEFAULT] * 3 + [PRESETS["batch"]] * 3
    assert all(now >= then for now, then in zip(opened.mtimes(), before, strict=True))
    assert opened.uses() == [int(quanta > 0)] * CHUNKS


def test_blocks_are_raised_too(opened: Opened) -> None:
    keys = [bytes([number]) * 16 for number in range(3)]
    blocks = opened.cache.blocks
    assert blocks.put(keys[:2], [b"one", b"two"], priority=10) == [True, True]
    assert blocks.put(keys[1:], [b"two", b"three"], preset="rag") == [True, True]
    opened.settle()
    assert [opened.block(key).hints for key in keys] == [Hints(10), Hints(70, None), PRESETS["rag"]]


def test_a_parent_that_lost_its_hints_gets_those_of_its_children_at_the_next_renewal(root: CountingRoot) -> None:
    store, opened = local(root)
    with store:
        opened.put(priority=90, ttl=7_200)
        root.remove(opened.name(1))
        opened.put(priority=5, ttl=300)  # whoever repairs it knows no better
        assert opened.hints()[1] == Hints(5, 300)
        opened.pass_quanta()
        opened.get()
        assert opened.hints() == [Hints(90, 7_200)] * CHUNKS


HINTS = st.builds(
    lambda priority, ttl: {"priority": priority, "ttl": ttl},
    st.none() | st.integers(0, 100),
    st.none() | st.sampled_from(TTL_CLASSES_S),
)
STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(["put", "get", "wait"]), st.integers(1, CHUNKS), HINTS), max_size=12
)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.sampled_from([0, QUANTUM_S // 2, 3 * QUANTUM_S]))
def test_a_parent_is_never_staler_nor_worth_less_than_its_child(
    steps: list[tuple[int, str, int, dict[str, Any]]], skew_s: int
) -> None:
    root = CountingRoot()
    (first_store, first), (second_store, second) = local(root), local(root)
    second.clock.wall_s -= skew_s
    with first_store, second_store:
        before: list[int] = []
        for which, action, count, hints in steps:
            at = (first, second)[which]
            if action == "wait":
                first.pass_quanta(count % 2)
                second.pass_quanta(count % 2)
            elif action == "put":
                at.put(count, **hints)
            else:
                at.get(min(count, len(before)))
            mtimes, recencies = first.mtimes(), first.recencies()
            assert mtimes == sorted(set(mtimes), reverse=True)
            assert all(now >= then for now, then in zip(mtimes, before, strict=False))
            for parent, child in pairwise(recencies):
                assert parent.hints.covers(child.hints)
                # Where a clock is behind, a child can be of an earlier quantum than the one its parent is published in.
                assert parent.uses >= child.uses or skew_s
            before = mtimes


def test_a_root_of_whole_seconds_reads_as_default_hints() -> None:
    root = CountingRoot(grain_ns=NS_PER_S)
    store, opened = local(root)
    with store:
        opened.put(preset="rag")
        assert opened.hints() == [DEFAULT] * CHUNKS
        assert {quantum_of(each.last_use_s + TICK_S, QUANTUM_S) for each in opened.recencies()} == {
            quantum_of(NOW_S, QUANTUM_S)
        }
        opened.put(preset="rag")
        tried = len(root.touched)
        assert tried <= CHUNKS
        opened.pass_quanta()
        opened.get()
        assert len(root.touched) == tried + CHUNKS, "recency itself is kept"
        assert {quantum_of(each.last_use_s + TICK_S, QUANTUM_S) for each in opened.recencies()} == {
            quantum_of(NOW_S, QUANTUM_S) + QUANTUM_S
        }
