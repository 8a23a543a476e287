"""Evictions: nothing that is held or pinned is deleted, whatever happens between two steps of a batch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.engine.gc_state import HostGcState
from kvstore.format.keyset import BlockKeys
from kvstore.host import eviction
from kvstore.host.eviction import EvictionVictim, begin_listing
from kvstore.host.pins import PinnedPrints
from kvstore.host.tables import HoldTable, Number, Shared, evicting_lock
from kvstore_gc.host import opened
from kvstore_gc.rank import victims_of
from tests.kit.host_parts import CHUNKS, SHARD_BITS, SPACE, Parts, child_of
from tests.kit.host_process import LAYOUT, TOKENS_COUNT, kv, tokens
from tests.kit.hosts import TICK_S
from tests.kit.patience import eventually
from tests.kit.programs import forked

STEPS = {"append": (Shared, "append"), "tables": (eviction, "live_tables"), "pins": (PinnedPrints, "read")}


def before(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[[], object], times: int = 1) -> None:
    """Acts before the call of a function, once, the ``times``-th time."""
    real, calls = getattr(owner, name), list[None]()

    def call(*arguments: Any, **named: Any) -> Any:
        calls.append(None)
        if len(calls) == times:
            act()
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, call)


def holds(parts: Parts, view: HostGcState, chain: Any, held: list[int]) -> None:
    """Holds as a node does: the table, then the log, then it looks for what it does not remember."""
    view.protect(chain.packed_addresses)
    count = view.leading(chain)
    held.append(len([at for at in parts.files(chain) if at < count]))


# Each order is needed: something happens between two steps.


@pytest.mark.parametrize("step, times", [("append", 1), ("tables", 1), ("tables", 2), ("pins", 1), ("pins", 2)])
def test_a_hold_between_two_steps_keeps_its_chunks(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, step: str, times: int
) -> None:
    chain, held = parts.chain(1), list[int]()
    before(monkeypatch, *STEPS[step], partial(holds, parts, parts.view(), chain, held), times)
    parts.evict(chain)
    assert held and parts.files(chain)[: held[0]] == list(range(held[0]))
    assert held[0] == (0 if times == 2 else CHUNKS), "what the log has is a miss"


@pytest.mark.parametrize("step, times", [("append", 1), ("tables", 1), ("tables", 2), ("pins", 1), ("pins", 2)])
def test_a_pin_between_two_steps_keeps_its_chunks(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, step: str, times: int
) -> None:
    chain, view, pins, pinned = parts.chain(1), parts.view(), parts.pins(), list[int]()

    def pin() -> None:
        run = view.protect(chain.packed_addresses)
        if count := view.leading(chain):
            pins.pin("me", chain.addresses[:count], 60, 0, chain.namespace.digest)
        view.unprotect(run)
        pinned.append(count)

    before(monkeypatch, *STEPS[step], pin, times)
    parts.evict(chain)
    assert pinned and parts.files(chain)[: pinned[0]] == list(range(pinned[0]))


@pytest.mark.parametrize("step", ["add", "leading"])
def test_an_eviction_between_two_steps_of_a_hold_is_seen(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    chain = parts.chain(1)
    with kvstore.open(parts.folder) as store:
        cache = store.namespace("model", LAYOUT)
        assert cache.match(tokens(1)) == TOKENS_COUNT, "it remembers them"
        owner = HoldTable if step == "add" else HostGcState
        before(monkeypatch, owner, step, lambda: parts.evict(chain))
        with cache.hold(tokens(1)) as hold:
            assert (
                hold.tokens == len(parts.files(chain)) * LAYOUT.chunk_tokens == len(hold.view()) * LAYOUT.chunk_tokens
            )


def test_a_put_after_a_listing_keeps_its_parents(parts: Parts) -> None:
    parts.chain(1)
    since_ns = begin_listing(str(parts.folder), parts.shared)
    ranking = parts.collector().list()
    longer = [*tokens(1), *tokens(2)]
    with kvstore.open(parts.folder, max_bytes=None) as store:
        store.namespace("model", LAYOUT).put(longer, np.concatenate([kv(1), kv(2)], axis=2))
    victims = victims_of(ranking.take(1 << 30))
    assert len(victims) == CHUNKS
    done = parts.eviction(since_ns).evict(victims)
    with kvstore.open(parts.folder, max_bytes=None) as store:
        assert done.count == 0 and store.namespace("model", LAYOUT).match(longer) == 2 * TOKENS_COUNT


def test_chunks_are_deleted_before_their_parents(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector is killed between any two deletions."""
    for deletions in range(1, CHUNKS):
        chain, unlink, calls = parts.chain(deletions), os.unlink, list[str]()

        def dies(path: str, calls: list[str] = calls, most: int = deletions, real: Any = unlink) -> None:
            if len(calls) == most:
                raise KeyboardInterrupt
            calls.append(path)
            real(path)

        collector = parts.collector()
        victims = victims_of(collector.list().take(1 << 30))
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(os, "unlink", dies)
            parts.eviction().evict(victims)
        assert parts.files(chain) == list(range(CHUNKS - deletions))
        parts.evict(chain)


def test_a_take_over_settles_and_deletes_nothing(parts: Parts) -> None:
    chain, view = parts.chain(1), parts.view()
    packed = chain.packed_addresses.hex()
    child_of(parts.folder, f"Shared(folder).append(bytes.fromhex({packed!r}))").communicate()
    assert view.leading(chain) == 0 and not view.is_calm
    with opened(str(parts.folder), parts.collector()._config, {}):
        assert view.leading(chain) == CHUNKS and view.is_calm and parts.files(chain) == list(range(CHUNKS))


def test_the_batch_of_a_killed_process_is_settled_by_a_put_and_by_an_opening(parts: Parts) -> None:
    chain, view = parts.chain(1), parts.view()
    parts.shared.append(chain.packed_addresses)
    with evicting_lock(str(parts.folder)):
        assert not view.settle(chain), "its process lives"
    assert view.settle(chain)
    parts.shared.append(chain.packed_addresses)
    with kvstore.open(parts.folder, max_bytes=None) as store:
        assert store.namespace("model", LAYOUT).match(tokens(1)) == TOKENS_COUNT


def test_a_forked_child_does_not_keep_the_lock_of_an_eviction(parts: Parts) -> None:
    with evicting_lock(str(parts.folder)):
        end_child = forked()
    with evicting_lock(str(parts.folder), waits=False):
        pass
    end_child()


# What was remembered is forgotten before it counts


def test_a_block_that_was_evicted_is_written_again(parts: Parts) -> None:
    key, block = b"0" * 32, bytes(LAYOUT.chunk_bytes)
    keyed = BlockKeys.of(SPACE, [key])
    with kvstore.open(parts.folder, memory=16 << 20, max_bytes=None) as store:
        blocks = store.namespace("model", LAYOUT).blocks
        assert blocks.put([key], [block], cache=False) == [True]
        time.sleep(TICK_S)
        assert parts.eviction().evict([EvictionVictim(keyed.addresses[0], SPACE.id, 1)]).count == 1
        assert blocks.put([key], [block], write="behind") == [True]
        assert blocks.match([key]) == 1


def test_prompts_that_were_evicted_are_not_matched(parts: Parts) -> None:
    with kvstore.open(parts.folder, max_bytes=None) as store:
        chain, cache = parts.chain(1), store.namespace("model", LAYOUT)
        assert cache.match_each([tokens(1)]) == [TOKENS_COUNT]
        parts.evict(chain)
        assert cache.match_each([tokens(1)]) == [0]


# What stays


def test_a_hold_past_its_time_keeps_nothing(parts: Parts) -> None:
    chain = parts.chain(1)
    with kvstore.open(parts.folder, max_bytes=None) as store:
        hold = store.namespace("model", LAYOUT).hold(tokens(1), ttl=0.1)
        assert hold.tokens == TOKENS_COUNT
        eventually(lambda: parts.evict(chain).count == CHUNKS)  # at the session's next beat


def test_a_held_child_keeps_its_ancestors(parts: Parts) -> None:
    chain, view = parts.chain(1), parts.view()
    run = view.protect(chain.addresses[2])
    victims, evict = parts.victims(chain), parts.eviction().evict
    done = evict(victims[:2])  # in two batches of one listing
    done += evict(victims[2:])
    assert parts.files(chain) == [0, 1, 2] and len(done.held) == 3 and done.count == 1
    view.unprotect(run)
    assert parts.evict(chain).count == 3


def test_a_used_child_keeps_its_ancestors(parts: Parts) -> None:
    chain = parts.chain(1)
    since_ns = begin_listing(str(parts.folder), parts.shared)
    (path,) = (parts.folder / "chunks").glob(f"*/{chain.addresses[1].hex()}.*")
    os.utime(path)
    done = parts.eviction(since_ns).evict(parts.victims(chain))
    assert parts.files(chain) == [0, 1] and (done.count, done.used_count) == (2, 1)


def test_a_deletion_that_fails_keeps_the_ancestors(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, unlink = parts.chain(1), os.unlink

    def refuses(path: str) -> None:
        if chain.addresses[2].hex() in path:
            raise PermissionError
        unlink(path)

    monkeypatch.setattr(os, "unlink", refuses)
    done = parts.evict(chain)
    assert (done.count, done.failed_count) == (1, 1) and parts.files(chain) == [0, 1, 2]


def test_evicted_bytes_are_free(parts: Parts) -> None:
    chain = parts.chain(1)
    size = sum(path.stat().st_size for path in Path(parts.folder / "chunks").glob("*/*"))
    parts.shared[Number.USED] = 10 * size
    done = parts.evict(chain)
    assert (done.size_bytes, parts.shared[Number.USED], parts.shared[Number.DELETED]) == (size, 9 * size, 2 * size)
    assert SHARD_BITS and parts.evict(chain).count == 0, "they are gone"
