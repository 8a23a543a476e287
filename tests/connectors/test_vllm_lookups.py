"""Look-ups of the vLLM connector: never waited for, with a deadline that becomes a miss. No vLLM is needed here."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import pytest

from kvstore import Layout
from kvstore.client.cache import BlockCache
from kvstore.connectors.common import LazyStore
from kvstore.connectors.vllm.lookups import POLL_S, UNKNOWN, Lookup, LookupResult, Lookups
from kvstore.connectors.vllm.metrics import EngineCounts
from kvstore.connectors.vllm.settings import ConnectorSettings
from kvstore.core.namespace import Namespace
from kvstore.transport.limits import BLOCKS_MAX
from tests.kit.patience import PATIENCE_S, eventually

KEYS = [[bytes([number]) * 32] for number in range(6)]
BLOCK = bytes(64)


@pytest.fixture
def store() -> Iterator[LazyStore]:
    """A store with two ranks' namespaces."""
    ranks = [Namespace.of("model", Layout(1, 1, 16, "int8", 1), attributes={"tp rank": str(rank)}) for rank in (0, 1)]
    opened = LazyStore(ConnectorSettings.of({"root": "memory://"}), ranks)
    yield opened
    opened.close()


@contextmanager
def looking(store: LazyStore, clock: Callable[[], float] = time.monotonic, **options: float) -> Iterator[Lookups]:
    settings = ConnectorSettings.of({"root": "memory://", "lookup_timeout_s": 5.0, "pause_s": 1.0, **options})
    lookups = Lookups(settings, store, EngineCounts(), clock)
    try:
        yield lookups
    finally:
        lookups.close()


def ranks(store: LazyStore) -> list[BlockCache]:
    caches = store.caches()
    assert caches is not None
    return caches


def put(cache: BlockCache, *numbers: int) -> None:
    keys = [KEYS[number][0] for number in numbers]
    assert cache.put(keys, [BLOCK] * len(keys)) == [True] * len(keys)


def result(lookups: Lookups, lookup: Lookup) -> LookupResult:
    ends_s = time.monotonic() + PATIENCE_S
    while (found := lookups.result(lookup)) is None:
        assert time.monotonic() < ends_s
        time.sleep(0.001)
    return found


def test_what_any_rank_lacks_is_not_there(store: LazyStore) -> None:
    first, second = ranks(store)
    put(first, 0, 1, 2, 3)
    put(second, 0, 1, 2)
    with looking(store) as lookups:
        assert result(lookups, lookups.begin(KEYS, 0)) == LookupResult(3, 3)
        assert result(lookups, lookups.begin(KEYS[:2], 0)) == LookupResult(2, 2)
        long = KEYS[:1] * (BLOCKS_MAX + 1)
        assert result(lookups, lookups.begin(long + KEYS[4:], 0)) == LookupResult(len(long), len(long))


def test_a_hole_before_what_the_engine_has_is_told_apart(store: LazyStore) -> None:
    for cache in ranks(store):
        put(cache, 0, 2, 3)
    with looking(store) as lookups:
        assert result(lookups, lookups.begin(KEYS, 0)) == LookupResult(1, 1)
        assert result(lookups, lookups.begin(KEYS, 2)) == LookupResult(1, 4)
        assert result(lookups, lookups.begin(KEYS, 5)) == LookupResult(1, 5)


def test_a_decode_engine_waits_for_what_is_being_written(store: LazyStore) -> None:
    def write() -> None:
        for number in range(6):
            time.sleep(0.02)
            for cache in ranks(store):
                put(cache, number)

    with looking(store, wait_s=20.0) as lookups:
        waited, absent = lookups.begin(KEYS, 0), lookups.begin([[b"?" * 32]], 0)
        writer = threading.Thread(target=write)
        writer.start()
        assert result(lookups, waited) == LookupResult(6, 6)
        assert lookups.result(absent) is None
        writer.join()


class Absent:
    """A store that has nothing."""

    def __init__(self) -> None:
        self.asked: Counter[bytes] = Counter()

    def caches(self) -> list[Absent]:
        return [self]

    def match(self, keys: list[bytes]) -> int:
        self.asked[keys[0]] += 1
        return 0

    def was_asked(self, times: int) -> bool:
        return list(self.asked.values()) == [times] * len(KEYS)


def test_many_that_wait_for_missing_blocks_look_once_an_interval() -> None:
    absent, now = Absent(), [100.0]
    with looking(cast(LazyStore, absent), lambda: now[0], wait_s=60.0) as lookups:
        for key in KEYS:
            lookups.begin([key], 0)
        for times in (1, 2, 3):
            eventually(partial(absent.was_asked, times))
            time.sleep(0.05)  # for those that would look again
            assert absent.was_asked(times)
            now[0] += POLL_S


class Stuck:
    """A store to a store that does not answer."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked = 0

    def caches(self) -> list[Stuck]:
        return [self]

    def match(self, keys: list[bytes]) -> int:
        self.asked += 1
        self.go.wait(PATIENCE_S)
        return len(keys)


def test_past_the_deadline_it_is_a_miss_and_the_next_ones_do_not_wait() -> None:
    stuck, now = Stuck(), [100.0]
    clock: Callable[[], float] = lambda: now[0]  # noqa: E731
    with looking(cast(LazyStore, stuck), clock, lookup_timeout_s=1.0, pause_s=10.0) as lookups:
        lookup = lookups.begin(KEYS, 0)
        while not stuck.asked:
            time.sleep(0.001)
        now[0] += 0.99
        assert lookups.result(lookup) is None
        now[0] += 0.02
        assert lookups.result(lookup) is UNKNOWN
        assert lookups.result(lookups.begin(KEYS, 0)) is UNKNOWN
        now[0] += 10.1
        stuck.go.set()
        # Answered at last: an abandoned look-up stays abandoned, and the next one asks again.
        assert result(lookups, lookups.begin(KEYS, 0)) == LookupResult(6, 6)
        assert lookups.result(lookup) is UNKNOWN
        assert stuck.asked >= 2


def test_a_store_that_is_down_is_no_reason_not_to_start() -> None:
    store = LazyStore(
        ConnectorSettings.of({"connect": "127.0.0.1:1"}), [Namespace.of("model", Layout(1, 1, 16, "int8", 1))]
    )
    try:
        assert store.caches() is None
        with looking(store) as lookups:
            assert lookups.result(lookups.begin(KEYS, 0)) is UNKNOWN
    finally:
        store.close()
