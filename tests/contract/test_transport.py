"""One contract for all transports: a cache's promises hold in this process and over each path to a worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvstore import Layout
from kvstore.client import Cache, Store
from kvstore.core.layout import DTYPES, DType
from kvstore.core.results import PutResult
from kvstore.errors import HoldBroken, InvalidRequest, LayoutMismatch, PermissionDenied, StoreFull, Unavailable
from kvstore.root.memory import MemoryFiles, MemoryRoot
from tests.kit.cases import for_each
from tests.kit.faulty_root import EIO, ENOSPC, EROFS, FaultyRoot, Missing, Rule
from tests.kit.stores import SMALL, TINY, kv_of, same
from tests.kit.workers import eventually, reached

SIZE = SMALL.chunk_tokens
TOKENS = np.arange(8 * SIZE)
KV = kv_of(SMALL, TOKENS)


@pytest.fixture
def root() -> FaultyRoot:
    return FaultyRoot(MemoryRoot(MemoryFiles()))


@pytest.fixture(params=["local", "shared", "tcp", "grpc"])
def store(request: pytest.FixtureRequest, root: FaultyRoot) -> Iterator[Store]:
    with reached(request.param, root) as opened:
        yield opened


@pytest.fixture
def cache(store: Store) -> Cache:
    return store.namespace("m", SMALL)


def is_chunk(name: str) -> bool:
    return name.startswith("chunks/")


# Put, match, get


def test_what_was_put_is_matched_and_read_back(cache: Cache) -> None:
    assert cache.put(TOKENS, KV) == PutResult(8 * SIZE, 8, 0, 8 * SMALL.chunk_bytes)
    assert cache.match(TOKENS) == 8 * SIZE
    count, array = cache.get(TOKENS)
    assert count == 8 * SIZE
    assert same(array, KV)


@for_each("tokens", [0, 1, SIZE - 1])
def test_less_than_a_chunk_is_never_stored(cache: Cache, tokens: int) -> None:
    assert cache.put(TOKENS[:tokens], KV[:, :, :tokens]) == PutResult(0, 0, 0, 0)
    assert cache.match(TOKENS[:tokens]) == 0
    assert cache.get(TOKENS[:tokens])[0] == 0
    with cache.hold(TOKENS[:tokens]) as hold:
        assert hold.tokens == 0
        assert hold.view() == []
        assert list(hold.layers()) == []
    assert cache.pin(TOKENS[:tokens]).tokens == 0
    assert cache.refcount(TOKENS[:tokens]) == 0


def test_a_second_put_finds_what_is_there(cache: Cache) -> None:
    cache.put(TOKENS[: 5 * SIZE], KV[:, :, : 5 * SIZE])
    assert cache.put(TOKENS, KV) == PutResult(8 * SIZE, 3, 5, 3 * SMALL.chunk_bytes)
    assert cache.put(TOKENS, KV) == PutResult(8 * SIZE, 0, 8, 0)


def test_put_goes_on_behind_a_prefix(cache: Cache) -> None:
    half = 4 * SIZE
    cache.put(TOKENS[:half], KV[:, :, :half])
    assert cache.put(TOKENS, KV[:, :, half:], prefix=half) == PutResult(8 * SIZE, 4, 0, 4 * SMALL.chunk_bytes)
    assert same(cache.get(TOKENS)[1], KV)


def test_put_stores_nothing_behind_a_hole(cache: Cache) -> None:
    half = 4 * SIZE
    for stored in (0, 2 * SIZE, 3 * SIZE):
        cache.put(TOKENS[:stored], KV[:, :, :stored])
        assert cache.put(TOKENS, KV[:, :, half:], prefix=half) == PutResult(stored, 0, 0, 0)
        assert cache.match(TOKENS) == stored


def test_put_keeps_no_reference(cache: Cache) -> None:
    mine = KV.copy()
    cache.put(TOKENS, mine)
    mine[:] = 0
    assert same(cache.get(TOKENS)[1], KV)


def test_get_into_less_room_reads_what_fits(cache: Cache) -> None:
    cache.put(TOKENS, KV)
    out = np.full_like(KV[:, :, : 3 * SIZE + 5], 7)
    assert cache.get(TOKENS, out=out) == 3 * SIZE
    assert same(out[:, :, : 3 * SIZE], KV[:, :, : 3 * SIZE])
    assert (out[:, :, 3 * SIZE :] == 7).all()
    assert cache.get(TOKENS, out=np.empty(SMALL.shape(0), SMALL.numpy_dtype)) == 0


def test_get_into_a_slice_along_tokens(cache: Cache) -> None:
    cache.put(TOKENS, KV)
    larger = np.full(SMALL.shape(10 * SIZE), 7, SMALL.numpy_dtype)
    assert cache.get(TOKENS, out=larger[:, :, SIZE : 9 * SIZE]) == 8 * SIZE
    assert same(larger[:, :, SIZE : 9 * SIZE], KV)
    assert (larger[:, :, :SIZE] == 7).all()
    assert (larger[:, :, 9 * SIZE :] == 7).all()


def test_arrays_that_are_not_contiguous(cache: Cache) -> None:
    turned = np.asfortranarray(KV)
    cache.put(TOKENS, turned)
    out = np.asfortranarray(np.zeros_like(KV))
    assert cache.get(TOKENS, out=out) == 8 * SIZE
    assert same(np.ascontiguousarray(out), KV)


@for_each("dtype", DTYPES)
def test_every_dtype(store: Store, dtype: DType) -> None:
    layout = Layout(layers=2, kv_heads=2, head_dim=6, dtype=dtype, chunk_tokens=8)
    kv = kv_of(layout, TOKENS)
    cache = store.namespace(dtype, layout)
    assert cache.put(TOKENS, kv).tokens_present == len(TOKENS)
    assert same(cache.get(TOKENS)[1], kv)


def test_chunks_larger_than_a_message(store: Store) -> None:
    layout = Layout(layers=3, kv_heads=4, head_dim=128, dtype="float16", chunk_tokens=1024)  # 6 MiB, sections of 1 MiB
    tokens = np.arange(3 * 1024)
    kv = kv_of(layout, tokens)
    cache = store.namespace("large", layout)
    assert cache.put(tokens, kv).chunks_written == 3
    assert same(cache.get(tokens)[1], kv)
    with cache.hold(tokens) as hold:
        for layer, k, v in hold.layers():
            assert same(k, kv[layer, 0])
            assert same(v, kv[layer, 1])


def test_a_million_tokens(store: Store) -> None:
    layout = Layout(layers=1, kv_heads=1, head_dim=1, dtype="int8", chunk_tokens=65_536)
    tokens = np.arange(1_000_000)
    kv = np.random.default_rng(1).integers(-128, 128, layout.shape(len(tokens)), dtype=np.int8)
    cache = store.namespace("long", layout)
    expected = 15 * 65_536
    assert cache.match(tokens) == 0
    assert cache.put(tokens, kv).tokens_present == expected
    assert cache.match(tokens) == expected
    assert same(cache.get(tokens)[1], kv[:, :, :expected])
    with cache.pin(tokens) as pin:
        assert pin.tokens == expected
        assert cache.refcount(tokens) == 1


# Namespaces


def test_namespaces_share_nothing(store: Store, cache: Cache) -> None:
    cache.put(TOKENS, KV)
    for other in (
        store.namespace("m", SMALL, tenant="another"),
        store.namespace("m", SMALL, fingerprint="other weights"),
        store.namespace("m", SMALL, attributes={"rope": "yarn"}),
    ):
        assert other.match(TOKENS) == 0
        assert other.get(TOKENS)[0] == 0
    assert len(store.namespaces()) == 4


def test_a_namespace_is_listed_as_it_was_opened(store: Store) -> None:
    made = store.namespace("näme", TINY, "weights", "tenant", {"b": "2", "a": "ä"}).namespace
    found = store.namespaces()
    assert found == [made]
    assert found[0].digest == made.digest


def test_another_layout_under_one_name(store: Store, cache: Cache) -> None:
    with pytest.raises(LayoutMismatch, match="exists with Layout\\(layers=3"):
        store.namespace("m", TINY)


# Holds


def test_a_hold_is_read_in_every_way(cache: Cache) -> None:
    cache.put(TOKENS, KV)
    with cache.hold(TOKENS) as hold:
        assert hold.tokens == 8 * SIZE
        out = np.empty_like(KV)
        assert hold.read_into(out) == 8 * SIZE
        assert same(out, KV)
        views = hold.view()
        assert [view.shape for view in views] == 8 * [SMALL.shape(SIZE)]
        assert same(np.concatenate(views, axis=2), KV)
        assert not any(view.flags.writeable for view in views)
        layers = list(hold.layers())
        assert [layer for layer, _, _ in layers] == list(range(SMALL.layers))
        for layer, k, v in layers:
            assert same(k, KV[layer, 0])
            assert same(v, KV[layer, 1])


def test_a_hold_of_part_of_a_prompt(cache: Cache) -> None:
    cache.put(TOKENS[: 3 * SIZE], KV[:, :, : 3 * SIZE])
    with cache.hold(TOKENS) as hold:
        assert hold.tokens == 3 * SIZE
        assert len(hold.view()) == 3
        _, k, _ = next(hold.layers())
        assert same(k, KV[0, 0, : 3 * SIZE])


def test_a_hold_that_ended_reads_nothing(cache: Cache) -> None:
    cache.put(TOKENS, KV)
    hold = cache.hold(TOKENS)
    hold.release()
    hold.release()
    for read in (lambda: hold.read_into(np.empty_like(KV)), hold.view, lambda: list(hold.layers())):
        with pytest.raises(HoldBroken, match="match again"):
            read()


def test_a_hold_past_its_time(cache: Cache) -> None:
    cache.put(TOKENS, KV)
    hold = cache.hold(TOKENS, ttl=0.001)
    threading.Event().wait(0.05)  # its time is real time
    with pytest.raises(HoldBroken, match="match again"):
        hold.read_into(np.empty_like(KV))
    hold.release()


def test_layers_can_be_left_in_the_middle(cache: Cache) -> None:
    cache.put(TOKENS, KV)
    with cache.hold(TOKENS) as hold:
        for _ in range(20):
            layers = hold.layers()
            next(layers)
            layers.close()  # type: ignore[attr-defined]  # it is a generator
        assert len(list(hold.layers())) == SMALL.layers


def test_layers_after_release_in_the_middle_break(cache: Cache) -> None:
    cache.put(TOKENS, KV)
    hold = cache.hold(TOKENS)
    layers = hold.layers()
    next(layers)
    hold.release()
    with pytest.raises(HoldBroken, match="match again"):
        list(layers)


def test_layers_are_read_into_memory_of_the_caller_in_turn(cache: Cache) -> None:
    cache.put(TOKENS, KV)
    for count in (3, 4, 5):
        # One array has room for more.
        out = [np.empty((2, len(TOKENS) + (at == 1), *KV.shape[3:]), KV.dtype) for at in range(count)]
        with cache.hold(TOKENS) as hold:
            read = []
            for layer, k, v in hold.layers(out):
                assert np.shares_memory(k, out[layer % count]) and np.shares_memory(v, out[layer % count])
                read.append((k, v))
                for late in range(max(0, layer - count + 3), layer + 1):  # those that must still be there
                    assert same(read[late][0], KV[late, 0]) and same(read[late][1], KV[late, 1])
        assert len(read) == SMALL.layers


def test_memory_that_layers_cannot_be_read_into_is_refused(cache: Cache) -> None:
    cache.put(TOKENS, KV)
    good = [np.empty((2, *KV.shape[2:]), KV.dtype) for _ in range(3)]
    read_only = good[0].copy()
    read_only.flags.writeable = False
    wrong: list[tuple[Any, str]] = [
        (good[:2], "expected 3 or more"),
        ([*good, good[0][:, :-1]], "at least"),
        ([*good, np.empty((2, *KV.shape[2:], 2), KV.dtype)[..., 0]], "contiguous"),
        ([*good, good[0]], "share memory"),
        ([*good, good[0].astype(np.float64)], "dtype"),
        ([*good, KV[0].tolist()], "numpy array"),
        ([*good, read_only], "read-only"),
        ([*good, good[0][0]], "shape"),
        (5, "three arrays"),
    ]
    for out, why in wrong:
        with cache.hold(TOKENS) as hold, pytest.raises(InvalidRequest, match=why):
            next(hold.layers(out))


# Pins


def test_pins_are_counted_listed_and_released(store: Store, cache: Cache) -> None:
    cache.put(TOKENS, KV)
    assert cache.refcount(TOKENS) == 0
    first = cache.pin(TOKENS, ttl=60, owner="tests")
    second = cache.pin(TOKENS[: 3 * SIZE], ttl=60, owner="tests")
    assert (first.tokens, second.tokens) == (8 * SIZE, 3 * SIZE)
    assert (cache.refcount(TOKENS), cache.refcount(TOKENS[: 3 * SIZE])) == (1, 2)
    listed = {pin.id: pin for pin in store.pins()}
    assert set(listed) == {first.id, second.id}
    assert (listed[first.id].owner, listed[first.id].namespace, listed[first.id].tokens) == ("tests", "m", 8 * SIZE)
    assert first.release()
    assert not first.release()
    assert store.unpin(second.id)
    assert store.pins() == []
    assert cache.refcount(TOKENS) == 0


def test_blocks_are_pinned_listed_and_released(store: Store, cache: Cache) -> None:
    keys, blocks = [bytes([number]) * 16 for number in range(4)], [bytes([number]) * 50 for number in range(4)]
    cache.blocks.put(keys[:2] + keys[3:], blocks[:2] + blocks[3:])
    with cache.blocks.pin(keys, ttl=60, owner="tests") as pin:
        assert pin.tokens == 3 * SIZE, "those that are there"
        (listed,) = store.pins()
        assert (listed.id, listed.owner, listed.namespace, listed.tokens) == (pin.id, "tests", "m", 3 * SIZE)
        cache.clear()
        assert cache.blocks.present(keys) == [True, True, False, True]
    assert store.pins() == []
    cache.clear()
    assert cache.blocks.present(keys) == [False] * 4


def test_a_pin_id_that_is_none(store: Store) -> None:
    with pytest.raises(InvalidRequest, match="pin id 'nonsense'"):
        store.unpin("nonsense")


def test_clear_leaves_what_is_pinned(store: Store, cache: Cache) -> None:
    other = store.namespace("other", SMALL)
    cache.put(TOKENS, KV)
    other.put(TOKENS, KV)
    with cache.pin(TOKENS[: 2 * SIZE]):
        cleared = cache.clear()
    assert (cleared.chunks, cleared.pinned, cleared.failed) == (6, 2, 0)
    assert cleared.bytes >= 6 * SMALL.chunk_bytes
    assert cache.match(TOKENS) == 2 * SIZE
    assert other.match(TOKENS) == 8 * SIZE


# Blocks

KEYS = [bytes([number]) * (16 + number) for number in range(40)]
BLOCKS = [bytes([255 - number]) * (1 + 997 * number) for number in range(40)]


def test_blocks_are_stored_matched_and_read(cache: Cache) -> None:
    assert cache.blocks.match(KEYS) == 0
    assert cache.blocks.put(KEYS, BLOCKS) == 40 * [True]
    assert cache.blocks.match(KEYS) == 40
    buffers = [bytearray(len(block)) for block in BLOCKS]
    assert cache.blocks.get(KEYS, buffers) == 40 * [True]
    assert [bytes(buffer) for buffer in buffers] == BLOCKS


def test_blocks_that_are_missing_among_others(cache: Cache) -> None:
    cache.blocks.put(KEYS[::2], BLOCKS[::2])
    assert cache.blocks.match(KEYS) == 1
    buffers = [bytearray(len(block)) for block in BLOCKS]
    assert cache.blocks.get(KEYS, buffers) == 20 * [True, False]
    assert [bytes(buffer) for buffer in buffers[::2]] == BLOCKS[::2]


def test_each_block_is_looked_for_by_itself_and_held_until_released(cache: Cache) -> None:
    cache.blocks.put(KEYS[::2], BLOCKS[::2])
    assert cache.blocks.present(KEYS) == 20 * [True, False]
    with cache.blocks.hold(KEYS, ttl=60) as hold:
        assert hold.present == 20 * [True, False]
        buffers = [bytearray(len(block)) for block in BLOCKS]
        assert hold.get(KEYS, buffers) == 20 * [True, False]
        assert [bytes(buffer) for buffer in buffers[::2]] == BLOCKS[::2]
    hold.release()
    with pytest.raises(InvalidRequest, match="ttl"):
        cache.blocks.hold(KEYS, ttl=0)


def test_a_block_of_another_size_is_not_stored_and_its_read_a_miss(cache: Cache) -> None:
    cache.blocks.put(KEYS[:2], [b"12345", b"abc"])
    assert cache.blocks.put(KEYS[:2], [b"1234", b"xyz"]) == [False, True]
    buffers = [bytearray(4), bytearray(3)]
    assert cache.blocks.get(KEYS[:2], buffers) == [False, True]
    assert bytes(buffers[1]) == b"abc"


def test_no_blocks_at_all(cache: Cache) -> None:
    assert cache.blocks.put([], []) == []
    assert cache.blocks.match([]) == 0
    assert cache.blocks.get([], []) == []
    assert cache.blocks.present([]) == []
    assert cache.blocks.hold([]).present == []


def test_blocks_larger_than_a_window(cache: Cache) -> None:
    blocks = [np.random.default_rng(number).bytes(9_000_000) for number in range(2)]
    assert cache.blocks.put(KEYS[:2], blocks) == [True, True]
    arrays = [np.empty(9_000_000, np.uint8) for _ in range(2)]
    assert cache.blocks.get(KEYS[:2], arrays) == [True, True]
    assert [array.tobytes() for array in arrays] == blocks


# What goes wrong


def test_a_chunk_lost_under_a_layer_by_layer_read(cache: Cache, root: FaultyRoot) -> None:
    cache.put(TOKENS, KV)
    with cache.hold(TOKENS) as hold:
        root.set_rules([Rule("open", Missing(), is_chunk, nth=5)])
        with pytest.raises(HoldBroken) as broken:
            list(hold.layers())
    valid = broken.value.tokens_valid
    assert valid % SIZE == 0
    assert valid < 8 * SIZE
    assert f"from token {valid} on" in str(broken.value)


def test_put_full_root_returns_the_reason(cache: Cache, root: FaultyRoot) -> None:
    half = 4 * SIZE
    cache.put(TOKENS[:half], KV[:, :, :half])
    cache.blocks.put(KEYS[:1], BLOCKS[:1])
    root.set_rules([Rule("stage", ENOSPC)])
    assert cache.put(TOKENS, KV) == PutResult(half, 0, 0, 0, "full")
    assert cache.put(TOKENS[:half], KV[:, :, :half], required=True) == PutResult(half, 0, 4, 0), "nothing is lacking"
    stored = cache.blocks.put(KEYS, BLOCKS)
    assert (stored, stored.reason) == ([True] + 39 * [False], "full")
    with pytest.raises(StoreFull, match="injected"):
        cache.put(TOKENS, KV, required=True)
    with pytest.raises(StoreFull, match="injected"):
        cache.blocks.put(KEYS, BLOCKS, required=True)


@pytest.mark.parametrize(("fault", "error"), [(EROFS, PermissionDenied), (EIO, Unavailable)], ids=["ro", "io"])
def test_a_root_that_cannot_be_written(cache: Cache, root: FaultyRoot, fault: Any, error: type[Exception]) -> None:
    root.set_rules([Rule("stage", fault)])
    with pytest.raises(error, match="injected"):
        cache.put(TOKENS, KV)
    with pytest.raises(error, match="injected"):
        cache.blocks.put(KEYS, BLOCKS)
    root.set_rules([])
    assert cache.put(TOKENS, KV).tokens_present == 8 * SIZE


def test_a_root_that_cannot_be_read_is_a_miss(cache: Cache, root: FaultyRoot) -> None:
    cache.put(TOKENS, KV)
    cache.blocks.put(KEYS, BLOCKS)
    root.set_rules([Rule("open", EIO, is_chunk)])
    assert cache.get(TOKENS)[0] == 0
    assert cache.blocks.get(KEYS, [bytearray(len(block)) for block in BLOCKS]) == 40 * [False]
    root.set_rules([Rule("stat", EIO, is_chunk)])
    assert cache.blocks.present([bytes(32)]) == [False]
    root.set_rules([Rule("open", EIO, is_chunk)])
    with cache.hold(TOKENS) as hold:
        assert hold.read_into(np.empty_like(KV)) == 0
        assert hold.view() == []


def test_many_threads_at_once(cache: Cache) -> None:
    def work(number: int) -> None:
        for turn in range(6):
            tokens = np.arange(4 * SIZE) + 1000 * (number // 2) + 10_000 * turn
            kv = kv_of(SMALL, tokens)
            cache.put(tokens, kv)
            assert cache.match(tokens) == 4 * SIZE
            assert same(cache.get(tokens)[1], kv)

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(work, range(12)))


def test_stats_count_what_was_done(store: Store, cache: Cache) -> None:
    cache.put(TOKENS, KV)
    cache.get(TOKENS)
    stats = store.stats()
    assert stats["chunks_written"] == 8
    assert stats["chunks_read"] == 8
    assert stats["bytes_written"] == stats["bytes_read"] == 8 * SMALL.chunk_bytes
    # A worker lets go once it has heard that the client has read, for which the client does not wait.
    eventually(lambda: store.stats()["holds"] == 0, "the hold of the get is released")
