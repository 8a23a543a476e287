"""Bad input gets a clear error that says what was wrong, what was expected and what to do; and harms nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Layout
from kvstore.client import Cache, Store
from kvstore.engine.settings import Limits, TierSettings
from kvstore.errors import InvalidRequest, RootMismatch
from tests.kit.cases import for_each
from tests.kit.stores import SMALL, kv_of, same, store_on

TOKENS = np.arange(4 * SMALL.chunk_tokens)
KV = kv_of(SMALL, TOKENS)


@pytest.fixture
def store(tmp_root: Path) -> Iterator[Store]:
    with store_on(tmp_root) as opened:
        yield opened


@pytest.fixture
def cache(store: Store) -> Cache:
    return store.namespace("m", SMALL)


@for_each(
    "tokens, says",
    [
        ([1, -2, 3], "ids from 0 to 4294967295: item 1 is -2"),
        ([1, 2**32], "item 1 is 4294967296"),
        (np.array([1, -5], np.int16), "item 1 is .*-5"),
        ([1, 2**70], "item 1 is 1180591620717411303424"),
        (np.zeros(3, np.float32), "item 0 is .*0.0"),
        ([[1, 2], [3, 4]], r"flat sequence .*: item 0 is \[1, 2\]"),
        ([[1, 2], [3]], r"item 0 is \[1, 2\]"),
        ({1, 2}, "tokens are a set: expected a sequence"),
        (["a", "b"], "item 0 is 'a'"),
        ([1, "b"], "item 1 is 'b'"),
        (np.array(3), "tokens are a ndarray: expected a sequence"),
        ("hello", "str"),
        (17, "int: expected a sequence"),
        (range(5_000_000), "over the limit of 4194304"),
    ],
)
def test_tokens_that_are_no_tokens(cache: Cache, tokens: Any, says: str) -> None:
    for call in (cache.match, cache.get, cache.hold, cache.pin, cache.refcount, lambda wrong: cache.put(wrong, KV)):
        with pytest.raises(InvalidRequest, match=says):
            call(tokens)
    with pytest.raises(ValueError, match=says):
        cache.match(tokens)


@for_each(
    "tokens",
    [
        [0, 1, 2, 2**32 - 1] * 8,
        tuple(range(32)),
        range(32),
        np.arange(32, dtype=np.int64),
        np.arange(32, dtype=np.uint16),
        np.arange(32, dtype=">u4"),
        np.arange(64, dtype=np.uint32)[::2],
    ],
)
def test_any_sequence_of_ints_is_taken(store: Store, tokens: Any) -> None:
    cache = store.namespace(f"{type(tokens)} {getattr(tokens, 'dtype', '')}", SMALL)
    kv = kv_of(SMALL, np.asarray(tokens, dtype=np.uint32))
    assert cache.put(tokens, kv).tokens_present == 32
    assert cache.match([int(token) for token in tokens]) == 32
    assert same(cache.get(tokens)[1], kv)


@for_each(
    "kv, says",
    [
        (KV[:, :, :-1], r"has 63 tokens: expected 64"),
        (KV[:2], r"expected \(3, 2, tokens, 2, 8\)"),
        (KV.astype(np.float32), "dtype float32: expected float16"),
        (KV.view(np.int16), "dtype int16"),
        (KV.tolist(), "is a list: expected a numpy array"),
        (KV.swapaxes(2, 3), "shape"),
    ],
)
def test_kv_that_does_not_fit_the_layout(cache: Cache, kv: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        cache.put(TOKENS, kv)
    assert cache.match(TOKENS) == 0


@for_each(
    "number, view",
    enumerate(
        [
            np.asfortranarray,
            lambda kv: np.ascontiguousarray(kv[::-1])[::-1],
            lambda kv: np.repeat(kv, 2, axis=2)[:, :, ::2],
            lambda kv: np.concatenate([kv, kv], axis=2)[:, :, : kv.shape[2]],
            lambda kv: np.ascontiguousarray(kv.swapaxes(0, 1)).swapaxes(0, 1),
            lambda kv: np.ascontiguousarray(kv.swapaxes(3, 4)).swapaxes(3, 4),
            lambda kv: kv.view(np.uint16),
        ]
    ),
)
def test_arrays_in_any_memory_order_are_put_and_read_into(store: Store, number: int, view: Any) -> None:
    cache = store.namespace(f"m{number}", SMALL)
    kv = view(KV)
    assert cache.put(TOKENS, kv).tokens_present == len(TOKENS)
    assert same(cache.get(TOKENS)[1], KV)
    out = view(np.zeros_like(KV))
    assert cache.get(TOKENS, out=out) == len(TOKENS)
    assert np.array_equal(
        out.view(np.uint16) if out.flags.c_contiguous else np.ascontiguousarray(out).view(np.uint16), KV.view(np.uint16)
    )
    with cache.hold(TOKENS) as hold:
        out = view(np.zeros_like(KV))
        assert hold.read_into(out) == len(TOKENS)


def test_memory_that_cannot_be_read_into_is_refused(cache: Cache) -> None:
    cache.put(TOKENS, KV)
    cache.blocks.put([b"k" * 16], [b"abc"])
    read_only, small = np.zeros_like(KV), np.zeros(SMALL.shape(10), SMALL.numpy_dtype)
    read_only.flags.writeable = False
    with pytest.raises(InvalidRequest, match="read-only"):
        cache.get(TOKENS, out=read_only)
    with cache.hold(TOKENS) as hold, pytest.raises(InvalidRequest, match="room for 10 tokens"):
        hold.read_into(small)
    wrong: list[tuple[Any, str]] = [
        (b"abc", "buffer 0 is read-only"),
        (np.zeros(6, np.uint8)[::2], "contiguous"),
        (bytearray(), "buffer 0 has 0 bytes"),
        (3, "buffer 0 is an int: expected contiguous bytes"),
    ]
    for buffer, says in wrong:
        with pytest.raises(InvalidRequest, match=says):
            cache.blocks.get([b"k" * 16], [buffer])


@for_each(
    "fields",
    [
        {"layers": 0},
        {"layers": True},
        {"kv_heads": 10**9},
        {"dtype": "float64"},
        {"chunk_tokens": 65_537},
        {"layers": 1024, "kv_heads": 1024, "head_dim": 1024},
    ],
)
def test_layouts_that_make_no_sense(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"expected|over the limit"):
        Layout(**{"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float16", "chunk_tokens": 16, **fields})


@for_each(
    "arguments",
    [
        {"name": ""},
        {"name": "x" * 1000},
        {"name": "m", "tenant": "\ud800"},
        {"name": "m", "fingerprint": "f" * 5000},
        {"name": "m", "attributes": {str(number): "" for number in range(65)}},
        {"name": "m", "attributes": {"rope": 1}},
    ],
)
def test_namespaces_that_make_no_sense(store: Store, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        store.namespace(layout=SMALL, **arguments)
    with pytest.raises(InvalidRequest, match=r"kvstore\.Layout"):
        store.namespace("m", {"layers": 3})  # type: ignore[arg-type]


@for_each(
    "keys, buffers, says",
    [
        ([b"short"], [b"x"], "key 0 is 5 bytes"),
        (["k" * 16], [b"x"], "key 0 is a str"),
        (b"k" * 16, [b"x"], "one bytes: expected a list"),
        ([b"k" * 16], [], "0 buffers for 1 keys"),
        ([b"k" * 16], [b""], "has 0 bytes"),
        ([b"k" * 16], [np.zeros((4, 4))[:, ::2]], "not contiguous"),
    ],
)
def test_blocks_that_make_no_sense(cache: Cache, keys: Any, buffers: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        cache.blocks.put(keys, buffers)


def test_blocks_are_read_into_separate_memory(cache: Cache) -> None:
    keys, memory = [bytes([number]) * 32 for number in range(3)], np.zeros(300, np.uint8)
    assert cache.blocks.put(keys, [bytes(100)] * 3) == [True] * 3
    apart = [memory[200:], memory[:100], memory[100:200]]
    assert cache.blocks.get(keys, apart) == [True] * 3
    with cache.blocks.hold(keys) as hold:
        for read in (cache.blocks.get, hold.get):
            with pytest.raises(InvalidRequest, match="buffers 0 and 2 share memory: give each"):
                read(keys, [memory[199:299], memory[:100], memory[100:200]])
            with pytest.raises(InvalidRequest, match="share memory"):
                read(keys[:2], [memory[:100]] * 2)
    assert cache.blocks.get(keys, apart) == [True] * 3, "nothing was set aside"


def test_a_folder_that_is_no_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(RootMismatch, match="empty folder"):
        kvstore.open(str(tmp_path))
    with pytest.raises(RootMismatch, match="mounted"):
        kvstore.open(str(tmp_path / "elsewhere"), create=False)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name != "elsewhere"] == ["precious.txt"]


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="more than 0"):
        Limits(io_threads=0)
    with pytest.raises(InvalidRequest, match="over io_threads"):
        Limits(io_threads=2, width=3)
    with pytest.raises(InvalidRequest, match="outlast"):
        Limits(hold_max_s=1.0)
    with pytest.raises(InvalidRequest, match="durability"):
        kvstore.open("/nowhere", durability="maybe")  # type: ignore[arg-type]


WORDS = np.array(["a", "b"])
"""What compares itself item by item, and so has no truth."""


MIB = 1 << 20


@for_each(
    "given, says",
    [
        ({"root_options": {5: 6}}, "root_options are a dict: expected names and values"),
        ({"keys": 5}, "keys are an int: expected the path of a key file"),
        ({"etcd": ""}, "etcd='' names none"),
        ({"etcd": "127.0.0.1:1", "etcd_tls": 5}, "etcd_tls is an int"),
        ({"etcd_user": kvstore.EtcdUser("me", "secret")}, "etcd_user says how to reach etcd, and none is given"),
        ({"max_bytes": WORDS}, "max_bytes=array.*: expected bytes"),
        ({"create": "no"}, "create='no': expected True or False"),
        ({"root": "/x/\udcff"}, "root '/x/.udcff' is not valid Unicode"),
        ({"memory": 1024}, "memory=1.00 KiB: expected 0, or at least 16.00 MiB"),
        ({"disk": ("/d", 64 * MIB)}, "disk without memory"),
        ({"memory": 16 * MIB, "disk": ("/d", 1)}, "disk of 1 B: expected at least 64.00 MiB"),
        ({"memory": 16 * MIB, "disk": "/d:1GiB"}, "disk='/d:1GiB': expected a folder and bytes, such as"),
        ({"memory": 16 * MIB, "write": "sometimes"}, "write='sometimes': expected one of through, behind"),
    ],
)
def test_open_with_an_invalid_argument_makes_no_root(tmp_root: Path, given: dict[str, Any], says: str) -> None:
    running = {each.name for each in threading.enumerate()}
    with pytest.raises(InvalidRequest, match=says) as refused:
        kvstore.open(**{"root": str(tmp_root / "new"), **given})
    assert "secret" not in str(refused.value)
    assert {each.name for each in threading.enumerate()} <= running, "no thread is left"
    assert not (tmp_root / "new").exists()


def test_sizes_are_also_taken_as_text(tmp_path: Path) -> None:
    given = TierSettings.of("16MiB", (tmp_path, "0.5 GiB"))  # type: ignore[arg-type]
    assert (given.memory_bytes, given.disk_folder, given.disk_bytes) == (16 * MIB, str(tmp_path), 512 * MIB)
    for seconds in (0.0, 3601.0, float("nan")):
        with pytest.raises(InvalidRequest, match=r"sync_interval=.*: expected 0\.05 to 3600 seconds"):
            TierSettings.of(16 * MIB, sync_interval_s=seconds)


def test_clear_of_no_selection_clears_nothing(store: Store, cache: Cache) -> None:
    cache.put(TOKENS, KV)
    with pytest.raises(InvalidRequest, match=r"'m': expected kvstore\.Selection"):
        store.clear("m")  # type: ignore[arg-type]
    assert cache.match(TOKENS) == len(TOKENS)
