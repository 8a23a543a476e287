"""Every keyword of every public call, given what it cannot be: a KVStoreError that says so, or a result.

An error of numpy or Python from inside would name neither the argument nor what was expected.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.client import Cache, Store
from kvstore.client.cache import BlockHold, Hold
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.segments import Held, Rope
from tests.kit.cases import for_each
from tests.kit.stores import SMALL
from tests.kit.wire import KV, TOKENS
from tests.kit.workers import connected, serving
from tests.segments.test_rope import LLAMA

KEYS = [bytes([number]) * 16 for number in range(3)]
LONG = 10**5000
ODD: list[Any] = [
    *(np.arange(3), np.array(1.0), np.array([]), np.int64(-3), np.bool_(True)),
    *(None, "x", "\ud800", "a\0b", b"x", -1, 1.5, float("nan"), float("inf"), 10**30, LONG, True),
    *([], [None], {}, {1}, object(), slice),
]
ROPE = Rope.of({**LLAMA, "head_dim": SMALL.head_dim})


def raw_errors(what: str, call: Callable[..., object], /, **right: Any) -> list[str]:
    """The calls with one wrong argument each that raised what is no error of ours."""
    found = []
    for keyword in inspect.signature(call).parameters:
        for value in ODD:
            try:
                made = call(**{**right, keyword: value})
                if isinstance(made, Hold | BlockHold | Held):
                    made.release()
            except KVStoreError as error:
                assert str(error)
            except Exception as error:  # noqa: BLE001 - what must not come is the question
                found.append(f"{what}({keyword}={type(value).__name__}): {type(error).__name__}: {error}")
    return found


@pytest.fixture(params=["opened", "connected"])
def store(request: pytest.FixtureRequest, tmp_root: Path) -> Iterator[Store]:
    if request.param == "opened":
        with kvstore.open(tmp_root / "root", memory=64 << 20, max_bytes=None) as opened:
            yield opened
        return
    with serving() as served, connected(served) as remote:
        yield remote


@pytest.fixture
def cache(store: Store) -> Cache:
    cache = store.namespace("m", SMALL)
    cache.put(TOKENS, KV)
    cache.blocks.put(KEYS, [bytes(100)] * len(KEYS))
    return cache


def test_no_keyword_of_a_cache_raises_what_is_not_ours(store: Store, cache: Cache) -> None:
    raw = raw_errors("namespace", store.namespace, name="q", layout=SMALL)
    raw += raw_errors("unpin", store.unpin)
    raw += raw_errors("clear", store.clear, selection=kvstore.Selection(tenant="nobody"), dry_run=True)
    raw += raw_errors("put", cache.put, tokens=TOKENS, kv=KV)
    for name in ("match", "get", "hold", "pin", "refcount", "prefetch", "evict_first"):
        raw += raw_errors(name, getattr(cache, name), tokens=TOKENS)
    raw += raw_errors("plan", cache.plan, prompts=[TOKENS], memory_tokens=1000)
    raw += raw_errors("plan.run", cache.plan([TOKENS], memory_tokens=1000).run)
    with cache.hold(TOKENS) as hold:
        raw += raw_errors("hold.read_into", hold.read_into)
        raw += raw_errors("hold.layers", lambda out=None: list(hold.layers(out)))
    assert raw == []


def test_no_keyword_of_blocks_raises_what_is_not_ours(cache: Cache) -> None:
    blocks, put = cache.blocks, {"keys": KEYS, "buffers": [bytes(100)] * len(KEYS)}
    get = {"keys": KEYS, "buffers": [bytearray(100) for _ in KEYS]}
    raw = raw_errors("put", blocks.put, **put)
    for name in ("match", "present", "hold", "pin"):
        raw += raw_errors(name, getattr(blocks, name), keys=KEYS)
    raw += raw_errors("get", blocks.get, **get)
    with blocks.hold(KEYS) as hold:
        raw += raw_errors("hold.get", hold.get, **get)
    raw += raw_errors("Descent", kvstore.Descent, tokens=[1], depth=0)
    assert raw == []


def test_no_keyword_of_segments_raises_what_is_not_ours(cache: Cache) -> None:
    raw = raw_errors("segments", cache.segments, rope=ROPE)
    raw += raw_errors("Rope.of", Rope.of, model_config={**LLAMA, "head_dim": SMALL.head_dim})
    segments = cache.segments(ROPE)
    raw += raw_errors("put", segments.put, tokens=TOKENS, kv=KV)
    raw += raw_errors("find", segments.find, tokens=TOKENS)
    raw += raw_errors("hold", segments.hold, matches=[])
    assert raw == []


def test_no_keyword_of_open_raises_what_is_not_ours(tmp_root: Path) -> None:
    def opening(**given: Any) -> None:
        kvstore.open(**{"root": "memory://", "memory": 16 << 20, **given}).close()

    def given(keyword: str) -> Callable[[Any], None]:
        return lambda value: opening(**{keyword: value})

    raw = []
    for keyword in inspect.signature(kvstore.open).parameters:
        if keyword in ("root", "etcd", "keys"):  # some of these are names, of what is not there
            continue
        raw += raw_errors(keyword, given(keyword))
    raw += raw_errors("root", lambda value: opening(root=str(tmp_root / value) if isinstance(value, str) else value))
    raw += raw_errors("keys", lambda value: opening(keys=str(tmp_root / value) if isinstance(value, str) else value))
    raw += raw_errors("etcd", lambda value: opening(etcd=None if isinstance(value, str) else value))
    raw += raw_errors("etcd", lambda value: opening(etcd=None if isinstance(value, str) else [value]))
    assert raw == []


def test_no_keyword_of_connect_raises_what_is_not_ours() -> None:
    def connecting(*workers: Any, **given: Any) -> None:
        kvstore.connect(*workers, **given).close()

    def given(keyword: str) -> Callable[[Any], None]:
        return lambda value: connecting("127.0.0.1:1", **{keyword: value})

    raw = raw_errors("workers", lambda value: connecting(value))  # noqa: PLW0108 - its one parameter has the name
    for keyword in inspect.signature(kvstore.connect).parameters:
        if keyword in ("workers", "etcd", "token_file"):
            continue
        raw += raw_errors(keyword, given(keyword))
    for name in ("a\0b", "\ud800"):
        with pytest.raises(InvalidRequest, match="token file"):
            connecting("127.0.0.1:1", token_file=name)
    raw += raw_errors("Limits", kvstore.Limits) + raw_errors("ClientLimits", kvstore.ClientLimits)
    assert raw == []


def test_put_with_an_invalid_cache_flag_is_refused(cache: Cache) -> None:
    flag: Any = 1
    with pytest.raises(InvalidRequest, match="cache=1: expected True or False"):
        cache.put(TOKENS, KV, cache=flag)
    with pytest.raises(InvalidRequest, match="cache=False with write='behind'"):
        cache.put(TOKENS, KV, write="behind", cache=False)
    assert cache.put(TOKENS, KV, cache=False).tokens_present == len(TOKENS)


@pytest.mark.filterwarnings("error")  # numpy's of a bound that a small type cannot hold
@for_each("seconds", [np.int64(60), np.uint8(60), np.float64(60.5), np.float32(60), np.float16(60)])
def test_numbers_of_numpy_are_seconds(store: Store, cache: Cache, tmp_root: Path, seconds: Any) -> None:
    with kvstore.open(f"file://{tmp_root}/other", ttl=seconds) as opened:
        assert opened.namespace("m", SMALL).put(TOKENS, KV, ttl=seconds).chunks_written == 4
        assert cache.put(TOKENS, KV, ttl=seconds).tokens_present == len(TOKENS)
    segments = cache.segments(ROPE)
    with cache.hold(TOKENS, ttl=seconds) as hold, cache.blocks.hold(KEYS, ttl=seconds):
        assert hold.tokens == len(TOKENS)
    with segments.hold(segments.find(TOKENS), ttl=seconds):
        assert cache.pin(TOKENS, ttl=seconds).release()
    cache.blocks.pin(KEYS, ttl=seconds)
    assert kvstore.Hints.of(ttl_s=seconds) == kvstore.Hints.of(ttl_s=60.0)
