"""A root that hangs, fails, fills up or turns read-only: every call ends in time, with a miss or the right error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import Store
from kvstore.engine.settings import Limits
from kvstore.errors import HoldBroken, Unavailable
from kvstore.root.posix import PosixRoot
from tests.kit.faulty_root import EROFS, Delay, FaultyRoot, Hang, Rule
from tests.kit.patience import eventually, stretched
from tests.kit.stores import SMALL, chunk_files, flip, hasty_while_faulty, in_turn, kv_of, member_of, same, store_on

QUICK = Limits(
    match_deadline_s=0.4, read_deadline_s=0.4, write_deadline_s=0.6, hold_max_s=30.0, stall_s=0.5, io_threads=4, width=2
)

TOKENS = np.arange(6 * SMALL.chunk_tokens)
KV = kv_of(SMALL, TOKENS)


def quick() -> Limits:
    return stretched(QUICK, "match_deadline_s", "read_deadline_s", "write_deadline_s", "stall_s")


@pytest.fixture
def store(root: FaultyRoot) -> Iterator[Store]:
    opened = store_on(root, quick())
    hasty_while_faulty(root, member_of(opened), quick())
    yield opened
    root.set_rules([])
    opened.close()


@pytest.mark.parametrize("operation", ["open", "read"])
def test_a_read_that_hangs_is_a_miss_and_never_writes_late(store: Store, root: FaultyRoot, operation: str) -> None:
    cache = store.namespace("m", SMALL)
    cache.put(TOKENS, KV)
    hang = Hang()
    root.set_rules([Rule(operation, hang, nth=3)])
    out = np.zeros_like(KV)
    count = cache.get(TOKENS, out=out)
    assert count < len(TOKENS) and same(out[:, :, :count], KV[:, :, :count])
    assert hang.reached.is_set()
    # The engine uses the memory for something else now; the read that wakes up must not touch it.
    out[:] = 7
    mine = out.copy()
    root.set_rules([])
    hang.release.set()
    eventually(lambda: not store.stats()["root_hangs"])
    assert cache.get(TOKENS)[0] == len(TOKENS), "the store recovers by itself"
    assert same(out, mine)
    assert store.stats()["miss_deadline"] >= 1


@pytest.mark.parametrize("operation", ["stat", "stage", "publish"])
def test_a_put_that_hangs_is_shed_and_publishes_nothing_wrong(
    store: Store, root: FaultyRoot, tmp_root: Path, operation: str
) -> None:
    cache = store.namespace("m", SMALL)
    hang = Hang()
    root.set_rules([Rule(operation, hang, nth=2)])
    kv = KV.copy()
    with pytest.raises(Unavailable, match="in time"):
        cache.put(TOKENS, kv)
    # The engine reuses the memory at once. A call that wakes up now must not publish what it finds there.
    kv[:] = 0
    root.set_rules([])
    hang.release.set()
    count, found = cache.get(TOKENS)
    assert same(found, KV[:, :, :count])
    assert cache.put(TOKENS, KV).tokens_present == len(TOKENS)
    count, found = cache.get(TOKENS)
    assert count == len(TOKENS) and same(found, KV)
    assert (store.stats()["miss_damaged"], store.stats()["put_failed"]) == (0, 1)


def test_when_every_thread_hangs_calls_fail_at_once_until_the_root_is_back(store: Store, root: FaultyRoot) -> None:
    cache = store.namespace("m", SMALL)
    cache.put(TOKENS[:32], KV[:, :, :32])
    hang = Hang()
    root.set_rules([Rule("open", hang), Rule("stat", hang)])
    eventually(lambda: cache.get(TOKENS[:32]) and store.stats()["root_hangs"] == 1)
    late = store.stats()["miss_deadline"]
    for _ in range(20):
        assert cache.get(TOKENS[:32])[0] == 0
        assert cache.match(TOKENS) <= 32
        with pytest.raises(Unavailable, match="does not answer"):
            cache.put(TOKENS, KV)
    assert store.stats()["miss_deadline"] == late, "nobody waits for a root that is known to hang"
    root.set_rules([])
    hang.release.set()
    eventually(lambda: not store.stats()["root_hangs"])
    assert cache.put(TOKENS, KV).tokens_present == len(TOKENS)


def test_a_failed_put_does_not_wait_for_its_staged_files_to_be_removed(store: Store, root: FaultyRoot) -> None:
    cache = store.namespace("m", SMALL)
    hang, removal = Hang(), Hang()
    root.set_rules([Rule("publish", hang), Rule("discard", removal)])
    with pytest.raises(Unavailable):
        cache.put(TOKENS, KV)
    root.set_rules([])
    hang.release.set()
    removal.release.set()


def test_a_busy_root_is_not_taken_for_one_that_hangs(tmp_root: Path) -> None:
    limits = Limits(io_threads=2, width=2, stall_s=3.0)  # a step of 0.1 s ends before that on any machine
    root = FaultyRoot(PosixRoot(tmp_root))
    with store_on(root, limits) as store:
        cache = store.namespace("m", SMALL)
        root.set_rules([Rule("stage", Delay(0.1))])
        many = np.arange(80 * SMALL.chunk_tokens)  # 4 s of two threads: longer than ``stall_s``
        seen: list[float] = []
        root_hangs = threading.Thread(target=lambda: cache.put(many, kv_of(SMALL, many)))
        root_hangs.start()
        while root_hangs.is_alive():
            seen.append(store.stats()["root_hangs"])
            root_hangs.join(0.02)
        assert not any(seen)


def test_closing_does_not_wait_for_a_root_that_hangs(root: FaultyRoot) -> None:
    store = store_on(root)
    hasty_while_faulty(root, member_of(store), quick())
    cache = store.namespace("m", SMALL)
    cache.put(TOKENS, KV)
    hang = Hang()
    root.set_rules([Rule(operation, hang) for operation in ("open", "touch", "remove_folder")])
    cache.get(TOKENS)
    store.close()
    hang.release.set()


def test_layers_that_hang_break_the_hold_in_time(store: Store, root: FaultyRoot) -> None:
    layout = replace(SMALL, layers=6)
    cache, kv = store.namespace("m", layout), kv_of(layout, TOKENS)
    cache.put(TOKENS, kv)
    hang, seen = Hang(), 0
    root.set_rules([Rule("read", hang, lambda name: False)])  # reads begin with the short deadlines
    with cache.hold(TOKENS) as hold:
        with pytest.raises(HoldBroken, match="not read in time"):
            for layer, k, _ in hold.layers(in_turn(layout, len(TOKENS))):
                root.set_rules([Rule("read", hang)])  # the next two are read by now, or are being read
                assert same(k, kv[layer, 0])
                seen += 1
    assert 1 <= seen <= 3
    hang.release.set()


def test_a_damaged_file_on_a_read_only_root_is_a_miss_each_time(store: Store, root: FaultyRoot, tmp_root: Path) -> None:
    cache = store.namespace("m", SMALL)
    cache.put(TOKENS, KV)
    for file in chunk_files(tmp_root):
        flip(file, 5000)
    root.set_rules([Rule("move", EROFS)])
    for _ in range(3):
        assert cache.get(TOKENS)[0] == 0
    assert store.stats()["quarantine_failed"] >= 3
    root.set_rules([])
    for _ in range(7):
        cache.get(TOKENS)
        cache.put(TOKENS, KV)
    assert same(cache.get(TOKENS)[1], KV)
