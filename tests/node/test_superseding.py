"""An abandoned branch goes first: what only it used, until it is used again; in a process and through a worker."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import Cache, Store
from kvstore.core.recency import Hints, Recency, decode, quantum_of
from kvstore.engine.engine import Engine
from kvstore.engine.settings import Limits
from kvstore.errors import InvalidRequest
from tests.kit.patience import eventually
from tests.kit.stores import TINY, SetClock, chunk_files, kv_of, member_of, store_on
from tests.kit.workers import connected, serving

NOW_S = 1_800_000_000.0
QUANTUM_S = Limits().quantum_s
SIZE = TINY.chunk_tokens
CHUNKS, KEPT = 6, 2
TOKENS = np.arange(CHUNKS * SIZE)
OTHER = np.concatenate((TOKENS[: 4 * SIZE], TOKENS[: 2 * SIZE] + 1000))
"""Another branch, which shares two chunks behind those that are kept."""
KEYS = [hashlib.blake2b(bytes([number]), digest_size=20).digest() for number in range(CHUNKS)]


class Opened:
    """A store on a folder, the node behind it, and a clock that both go by."""

    def __init__(self, store: Store, node: Engine, root: Path, clock: SetClock) -> None:
        self.store = store
        self.cache: Cache = store.namespace("m", TINY)
        self.clock = clock
        self._node = node
        self._root = root

    def drain(self) -> None:
        self._node.drain()

    def later(self) -> None:
        """The next quantum."""
        self.drain()
        self.clock.wall_s += QUANTUM_S

    def put(self, tokens: np.ndarray, hints: Hints | None = None) -> None:
        said = hints or Hints()
        ttl = math.inf if said.ttl_s is None else said.ttl_s
        self.cache.put(tokens, kv_of(TINY, tokens), priority=said.priority, ttl=ttl)
        self.drain()

    def get(self, tokens: np.ndarray) -> None:
        """Reads, and returns once the use is noted: a worker notes it when it has answered."""
        self.cache.get(tokens)
        now_s, count = quantum_of(self.clock.wall_s, QUANTUM_S), len(tokens) // SIZE

        def noted() -> bool:
            self.drain()
            found = [each for each in self.recencies().values() if each.depth < count]
            return all(each.last_use_s == now_s and not each.is_superseded for each in found)

        eventually(noted)

    def recencies(self) -> dict[str, Recency]:
        return {file.name: decode(file.stat().st_mtime_ns, QUANTUM_S) for file in chunk_files(self._root)}

    def left(self) -> list[int]:
        """The depths of superseded chunks."""
        self.drain()
        return sorted(each.depth for each in self.recencies().values() if each.is_superseded)


@pytest.fixture(params=["local", pytest.param("worker", marks=pytest.mark.slow)])
def opened(request: pytest.FixtureRequest, tmp_root: Path) -> Iterator[Opened]:
    clock = SetClock(NOW_S)
    if request.param == "local":
        with store_on(tmp_root, clock=clock) as store:
            yield Opened(store, member_of(store).node, tmp_root, clock)
        return
    with serving(tmp_root, clock=clock) as served, connected(served) as store:
        yield Opened(store, served.member.node, tmp_root, clock)


def test_what_is_behind_the_kept_tokens_goes_first_with_its_hints(opened: Opened) -> None:
    opened.put(TOKENS, Hints(70, 300))
    opened.later()
    opened.get(TOKENS)
    opened.cache.supersede(TOKENS, KEPT * SIZE)
    assert opened.left() == list(range(KEPT, CHUNKS))
    last_use_s = quantum_of(opened.clock.wall_s, QUANTUM_S)
    for each in opened.recencies().values():
        assert each.hints == Hints(70, 300) and each.last_use_s == last_use_s
        assert each.uses == (0 if each.is_superseded else 1)
    assert opened.store.stats()["superseded"] == CHUNKS - KEPT


def test_what_another_branch_used_later_stays_with_all_before_it(opened: Opened) -> None:
    opened.put(TOKENS)
    opened.later()
    opened.put(OTHER)
    opened.cache.supersede(TOKENS, 0)
    assert opened.left() == [4, 5], "the two behind what both share"


def test_what_anybody_used_since_stays(opened: Opened) -> None:
    opened.put(TOKENS)
    for _ in range(3):
        opened.later()
    opened.get(TOKENS)
    opened.drain()
    opened.cache.supersede(TOKENS, KEPT * SIZE, unused=2 * QUANTUM_S)
    assert opened.left() == []
    opened.cache.supersede(TOKENS, KEPT * SIZE)
    assert opened.left() == list(range(KEPT, CHUNKS))


@pytest.mark.parametrize(("use", "later"), [("get", False), ("put", True)])
def test_the_next_use_takes_a_branch_back(opened: Opened, use: str, later: bool) -> None:
    opened.put(TOKENS)
    opened.later()
    opened.get(TOKENS)
    opened.cache.supersede(TOKENS, KEPT * SIZE)
    assert opened.left() == list(range(KEPT, CHUNKS))
    if later:
        opened.later()
    uses: dict[str, Callable[[], object]] = {
        "get": lambda: opened.get(TOKENS[: 5 * SIZE]),
        "put": lambda: opened.put(TOKENS[: 5 * SIZE]),
    }
    uses[use]()
    assert opened.left() == [5], "what nobody used is still abandoned"
    assert min(each.uses for each in opened.recencies().values() if not each.is_superseded) == 1


@pytest.mark.parametrize("use", ["get", "match", "present", "put"])
def test_blocks_are_superseded_and_taken_back_alike(opened: Opened, use: str) -> None:
    blocks, buffers = opened.cache.blocks, [bytes([number]) * 100 for number in range(CHUNKS)]
    blocks.put(KEYS, buffers)
    blocks.supersede(KEYS[KEPT:])
    assert opened.left() == list(range(KEPT, CHUNKS))
    uses: dict[str, Callable[[], object]] = {
        "get": lambda: blocks.get(KEYS[:4], [bytearray(100) for _ in range(4)]),
        "match": lambda: blocks.match(KEYS[:4]),
        "present": lambda: blocks.present(KEYS[:4]),
        "put": lambda: blocks.put(KEYS[:4], buffers[:4]),
    }
    uses[use]()
    eventually(lambda: opened.left() == [4, 5])


def test_a_wrong_time_is_refused(opened: Opened) -> None:
    for unused in (-1, math.nan, math.inf, "long", True):
        with pytest.raises(InvalidRequest, match="expected seconds since your last use"):
            opened.cache.supersede(TOKENS, 0, unused=unused)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="expected seconds since your last use"):
            opened.cache.blocks.supersede(KEYS, unused=unused)  # type: ignore[arg-type]
