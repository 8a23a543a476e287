"""A fault at each step of each call, after which the store lives on.

The n-th call to the root or to the metadata fails, for n = 1, 2, 3 ... until the call meets no fault. A fault comes
before the step, or after it took effect; or the session is lost at that step. Whatever the call does then: nothing
stays held, pinned, counted, staged or barred, the bytes are valid, and the same call succeeds afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Layout
from kvstore.census.selection import Selection
from kvstore.client import Cache
from kvstore.errors import KVStoreError, Unavailable
from kvstore.worker.limits import WorkerLimits
from tests.kit.backends import REMOTE, Backend, backend
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.steps import Strike
from tests.kit.stores import SMALL, kv_of, same

pytestmark = pytest.mark.slow

SIZE = SMALL.chunk_tokens
CHUNKS = 3
STEPS_MAX = 60
"""More steps than any call takes."""
KEYS = [bytes([number]) * 16 for number in range(3)]
BLOCKS = [bytes([number]) * (50 + number) for number in range(3)]


def tokens_of(layout: Layout, chunks: int = CHUNKS) -> Any:
    return np.arange(chunks * layout.chunk_tokens)


@dataclass(frozen=True)
class Call:
    """A public call, what must exist before it, and how its success is told."""

    act: Callable[[Backend, Cache], Any]
    prepare: Callable[[Backend, Cache], object] = lambda backend, cache: None
    undo: Callable[[Any], object] = lambda result: None
    """Ends what a successful call leaves on purpose."""
    succeeds: Callable[[Any], bool] = lambda result: True
    may_leave: tuple[str, ...] = ()
    """What a call that raised may leave until the next one has succeeded."""
    may_keep: tuple[str, ...] = ()
    """What a call that raised may leave for good, or until its own time limit."""
    tidied: tuple[str, ...] = ()
    """What may stay until a collector tidies up."""
    ends_with_session: bool = False
    """Its result protects nothing, and uses nothing, once the session was lost."""
    may_raise: bool = True
    """False for reads: a fault is a miss."""


def put(backend: Backend, cache: Cache) -> Any:
    tokens = tokens_of(cache.layout)
    return cache.put(tokens, kv_of(cache.layout, tokens))


def get(backend: Backend, cache: Cache) -> int:
    """Asks for more than is stored: the end of the stored part is looked for on the root."""
    tokens = tokens_of(cache.layout, CHUNKS + 1)
    count, array = cache.get(tokens)
    assert same(np.ascontiguousarray(array), np.ascontiguousarray(kv_of(cache.layout, tokens)[:, :, :count])), "bytes"
    return count // cache.layout.chunk_tokens


def hold(backend: Backend, cache: Cache) -> Any:
    return cache.hold(tokens_of(cache.layout, CHUNKS + 1))


def pin(backend: Backend, cache: Cache) -> Any:
    return cache.pin(tokens_of(cache.layout), owner="tests")


def pin_blocks(backend: Backend, cache: Cache) -> Any:
    return cache.blocks.pin(KEYS, owner="tests")


def unpin(backend: Backend, cache: Cache) -> Any:
    """Releases the pins of ``pinned``, by their ids: false from a second try, if the first took effect."""
    return [backend.store.unpin(id) for id in backend.pin_ids]


def put_blocks(backend: Backend, cache: Cache) -> Any:
    return cache.blocks.put(KEYS, BLOCKS)


def get_blocks(backend: Backend, cache: Cache) -> Any:
    buffers = [bytearray(len(block)) for block in BLOCKS]
    found = cache.blocks.get(KEYS, buffers)
    for is_found, buffer, block in zip(found, buffers, BLOCKS, strict=True):
        assert not is_found or bytes(buffer) == block
    return found


def prefetch(backend: Backend, cache: Cache) -> Any:
    operation = cache.prefetch(tokens_of(cache.layout))
    operation.wait(PATIENCE_S)
    return operation


def sweep(backend: Backend, cache: Cache) -> Any:
    """A collector's pass: finish what another one began, then delete everything."""
    backend.collector().adopt()
    report = backend.sweep([cache.namespace])
    if report.sweeps["left"]:
        raise Unavailable("a sweep is left for the next round, as the report says")
    return report


def release(result: Any) -> None:
    result.release()


def stored_cold(backend: Backend, cache: Cache) -> None:
    """A prompt on the root that the node does not remember."""
    put(backend, cache)
    backend.settle()
    backend.evict_memory()
    backend.forget()


def stored_warm(backend: Backend, cache: Cache) -> None:
    """A prompt that is in memory, where there is one."""
    put(backend, cache)
    backend.settle()
    backend.forget()


def blocks_stored(backend: Backend, cache: Cache) -> None:
    put_blocks(backend, cache)
    backend.settle()
    backend.forget()


def pinned(backend: Backend, cache: Cache) -> None:
    stored_warm(backend, cache)
    pins = (pin(backend, cache), cache.pin(tokens_of(cache.layout, 1), owner="tests"))
    backend.pin_ids = [each.id for each in pins]


def part_stored(backend: Backend, cache: Cache) -> None:
    """The first chunk is stored: the put that follows writes the second and third."""
    tokens = tokens_of(cache.layout, 1)
    cache.put(tokens, kv_of(cache.layout, tokens))
    backend.settle()
    backend.forget()


CALLS: dict[str, Call] = {
    "put": Call(put, succeeds=lambda result: result.tokens_present > 0),
    "put of the rest": Call(put, part_stored, succeeds=lambda result: result.tokens_present > 0),
    "get cold": Call(get, stored_cold, succeeds=lambda count: count == CHUNKS, may_raise=False),
    "get warm": Call(get, stored_warm, succeeds=lambda count: count == CHUNKS, may_raise=False),
    "hold cold": Call(hold, stored_cold, release, lambda held: held.tokens > 0, ends_with_session=True),
    "hold warm": Call(hold, stored_warm, release, lambda held: held.tokens > 0, ends_with_session=True),
    "pin": Call(pin, stored_warm, release, lambda pinned: pinned.tokens > 0),
    "pin of blocks": Call(pin_blocks, blocks_stored, release, lambda pinned: pinned.tokens > 0),
    "unpin": Call(unpin, pinned, may_leave=("pins",)),
    "put of blocks": Call(put_blocks, succeeds=all),
    "get of blocks": Call(get_blocks, blocks_stored, succeeds=all, may_raise=False),
    # A deletion may still be in progress: the order, which keeps pins out, expires by itself.
    "clear": Call(lambda backend, cache: cache.clear(), stored_warm, may_keep=("clears/doing",)),
    "prefetch": Call(prefetch, stored_cold, succeeds=lambda it: (it.state, it.done) == ("done", CHUNKS * SIZE)),
    "sweep": Call(sweep, stored_cold, may_leave=("gc/condemned",), tidied=("plans", "trash", "quarantine")),
}
ROWS = [(name, act) for name in CALLS for act in ("before", "after", "session") if name != "clear" or act == "before"]
"""A clear whose replies are lost waits for the answers of other nodes, 15 s each time."""


def check_each_step(made: Backend, call: Call, act: str, name: str = "m") -> int:
    """Runs the call once for each of its steps; returns their number."""
    kept = set(call.tidied)
    strike: Any = {"before": Strike.BEFORE, "after": Strike.AFTER, "session": made.lose_session}[act]
    for position in range(1, STEPS_MAX):
        cache = made.cache(f"{name}{position}")
        call.prepare(made, cache)
        result, error = None, None
        with made.steps.armed(position, strike):
            try:
                result = call.act(made, cache)
            except KVStoreError as raised:
                error = raised
            made.settle()
        where = f"{act} step {position}, {made.steps.struck}: {error or result}"
        assert error is None or call.may_raise, where
        if not made.steps.struck:
            assert error is None and call.succeeds(result), where
            call.undo(result)
            return position - 1
        if error is None:
            if act == "session" and call.ends_with_session:
                check_idle(made, kept, f"{where}, before its release")
            call.undo(result)
        else:
            kept.update(call.may_keep)
        check_idle(made, {*kept, *call.may_leave} if error else kept, where)
        again = call.act(made, cache)
        assert call.succeeds(again), where
        call.undo(again)
        check_idle(made, kept, f"{where}, then again")
    raise AssertionError(f"more than {STEPS_MAX} steps")


def check_idle(made: Backend, allowed: Collection[str], where: str) -> None:
    """Asserts that nothing is in progress or left over."""
    try:
        made.assert_idle(allowed)
    except AssertionError as left:
        raise AssertionError(f"{where}: {left}") from None


@pytest.mark.parametrize(("name", "act"), ROWS)
def test_call_failing_at_any_step_in_memory_leaves_nothing(tmp_root: Path, name: str, act: str) -> None:
    with backend("memory", tmp_root) as made:
        check_each_step(made, CALLS[name], act)


@pytest.mark.parametrize(
    ("name", "act"), [row for row in ROWS if row[0] not in ("prefetch", "clear") and row[1] != "session"]
)
def test_call_failing_at_any_step_encrypted_leaves_nothing(tmp_root: Path, name: str, act: str) -> None:
    with backend("embedded", tmp_root, encrypted=True) as made:
        check_each_step(made, CALLS[name], act)


@pytest.mark.parametrize("name", ["put", "put of the rest", "get cold", "hold cold", "pin", "put of blocks"])
@pytest.mark.parametrize("way", ["shared", "tcp", "grpc"])
def test_call_failing_at_any_step_of_worker_leaves_nothing(tmp_root: Path, way: str, name: str) -> None:
    with backend(way, tmp_root) as made:
        check_each_step(made, CALLS[name], "before")


@pytest.mark.parametrize("name", ["put of the rest", "get cold"])
@pytest.mark.parametrize("way", ["memory", "shared", "tcp"])
def test_call_for_large_chunks_failing_leaves_nothing(tmp_root: Path, way: str, name: str) -> None:
    """Each chunk fills a run of the bulk protocol by itself."""
    layout = Layout(layers=2, kv_heads=8, head_dim=256, dtype="float16", chunk_tokens=544)  # 8.5 MiB a chunk
    with backend(way, tmp_root, layout=layout, memory_bytes=192 << 20) as made:
        check_each_step(made, CALLS[name], "before")


@pytest.mark.parametrize("strike", Strike)
def test_sweep_losing_any_transaction_leaves_none(tmp_root: Path, strike: Strike) -> None:
    """One lost request or reply is looked at again in the same pass; a condemned chunk would stay a miss."""
    with backend("embedded", tmp_root) as made:
        for position in range(1, STEPS_MAX):
            cache = made.cache(f"m{position}")
            stored_cold(made, cache)
            with made.steps.armed(position, strike, only="txn"):
                report = made.sweep([cache.namespace])
            assert report.sweeps["left"] == 0, position
            made.assert_idle(["plans", "trash"])
            if not made.steps.struck:
                assert position > 1
                return


@pytest.mark.parametrize("deletion", [1, 2, 3])
def test_pin_after_clear_cut_short_keeps_its_chunks(tmp_root: Path, deletion: int) -> None:
    """The deletion ends after the pin: the pin is refused, or all that it covers stays."""
    tokens = np.arange(3 * SIZE)
    reached, proceed = threading.Event(), threading.Event()

    def block() -> None:
        reached.set()
        assert proceed.wait(PATIENCE_S)

    with backend("embedded", tmp_root) as made:
        cache = made.cache()
        cache.put(tokens, kv_of(SMALL, tokens))
        with made.steps.armed(deletion, block, only="remove chunks/"):
            operation = made.store.clear(Selection(namespace=cache.namespace.digest))
            assert reached.wait(PATIENCE_S)
            operation.cancel()
            assert operation.wait(PATIENCE_S) and operation.state == "cancelled"
            try:
                pinned = cache.pin(tokens).tokens
            except Unavailable:
                pinned = 0
            proceed.set()
            eventually(lambda: made.steps.has_ended, "the deletion ends")
        assert all(made.on_root(cache, tokens)[: pinned // SMALL.chunk_tokens]), "a pinned chunk is deleted"


# Ends of holds: each returns its share of the worker's limits

HELD = np.arange(4 * SMALL.chunk_tokens)
LIMITED = {"count": WorkerLimits(holds_max=2), "tokens": WorkerLimits(hold_tokens_max=2 * len(HELD))}
HOLD_ROUNDS = 4
"""Twice as many holds as fit at once."""


def end_by_release(made: Backend, cache: Cache) -> None:
    with cache.hold(HELD) as hold:
        assert hold.tokens == len(HELD)


def end_by_time(made: Backend, cache: Cache) -> None:
    hold = cache.hold(HELD, ttl=0.001)
    eventually(lambda: made.store.stats()["client_holds"] == 0, "the hold expires")
    hold.release()


def end_by_error(made: Backend, cache: Cache) -> None:
    with pytest.raises(RuntimeError), cache.hold(HELD):
        raise RuntimeError


ENDS = {"release": end_by_release, "time": end_by_time, "error": end_by_error}


@pytest.mark.parametrize("limit", LIMITED)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("way", REMOTE)
def test_hold_after_many_ended_fits_limits(tmp_root: Path, way: str, end: str, limit: str) -> None:
    with backend(way, tmp_root, worker_limits=LIMITED[limit]) as made:
        cache = made.cache()
        cache.put(HELD, kv_of(SMALL, HELD))
        for _ in range(HOLD_ROUNDS):
            ENDS[end](made, cache)
            eventually(lambda: made.store.stats()["client_holds"] == 0, "the hold ends")
        made.assert_idle()
