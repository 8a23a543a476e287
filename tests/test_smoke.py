"""A test of each promise through the public interface, in seconds: `make check` runs these tests only."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvstore
import kvstore.aio
from kvstore import Cache, Layout, Store, errors
from tests.kit.patience import PATIENCE_S

LAYOUT = Layout(layers=2, kv_heads=2, head_dim=8, dtype="float16", chunk_tokens=16)
TOKENS = list(range(1000, 1070))
STORED = 64
"""Whole chunks of the prompt."""
KV = np.random.default_rng(0).standard_normal(LAYOUT.shape(len(TOKENS))).astype(np.float16)


def cache_in(store: Store, name: str = "model", fingerprint: str = "weights") -> Cache:
    return store.namespace(name, LAYOUT, fingerprint=fingerprint)


@pytest.fixture
def store(tmp_root: Path) -> Iterator[Store]:
    with kvstore.open(tmp_root / "kv") as opened:
        yield opened


@pytest.fixture
def cache(store: Store) -> Cache:
    """A cache with one prompt."""
    cache = cache_in(store)
    cache.put(TOKENS, KV)
    return cache


def test_put_prompt_is_read_back(store: Store) -> None:
    cache = cache_in(store)
    assert cache.match(TOKENS) == 0
    result = cache.put(TOKENS, KV)
    assert (result.tokens_present, result.chunks_written) == (STORED, 4)
    count, found = cache.get(TOKENS)
    assert count == STORED and np.array_equal(found, KV[:, :, :STORED])


def test_shared_prefix_is_found(cache: Cache) -> None:
    longer = [*TOKENS[:40], *range(40)]
    out = np.zeros(LAYOUT.shape(len(longer)), np.float16)
    assert cache.get(longer, out=out) == 32
    assert np.array_equal(out[:, :, :32], KV[:, :, :32])


def test_other_weights_are_a_miss(cache: Cache, store: Store) -> None:
    assert cache_in(store, fingerprint="other").match(TOKENS) == 0
    assert cache_in(store, "other").match(TOKENS) == 0


def test_second_put_keeps_first_bytes(cache: Cache) -> None:
    result = cache.put(TOKENS, np.zeros_like(KV))
    assert (result.chunks_found, result.chunks_written) == (4, 0)
    assert np.array_equal(cache.get(TOKENS)[1], KV[:, :, :STORED])


def test_hold_reads_layers(cache: Cache) -> None:
    with cache.hold(TOKENS) as hold:
        for layer, k, v in hold.layers():
            assert np.array_equal(np.stack([k, v]), KV[layer, :, :STORED])


def test_pin_is_counted_until_released(cache: Cache) -> None:
    pin = cache.pin(TOKENS, ttl=3600)
    assert (pin.tokens, cache.refcount(TOKENS)) == (STORED, 1)
    pin.release()
    assert cache.refcount(TOKENS) == 0


def test_blocks_are_read_back(store: Store) -> None:
    blocks, keys = cache_in(store).blocks, [bytes([number]) * 32 for number in range(3)]
    assert blocks.put(keys[:2], [b"first", b"second"]) == [True, True]
    buffers = [bytearray(5), bytearray(6), bytearray(5)]
    assert blocks.get(keys, buffers) == [True, True, False]
    assert buffers[:2] == [b"first", b"second"]


def test_corrupt_chunk_is_a_miss(tmp_root: Path) -> None:
    with kvstore.open(tmp_root / "kv") as store:
        cache_in(store).put(TOKENS, KV)
    for path in (tmp_root / "kv").rglob("*"):
        if path.is_file() and path.stat().st_size >= LAYOUT.chunk_bytes:
            path.chmod(0o644)
            data = bytearray(path.read_bytes())
            data[-LAYOUT.chunk_bytes // 2] ^= 1
            path.write_bytes(data)
    with kvstore.open(tmp_root / "kv") as store:
        assert cache_in(store).get(TOKENS)[0] == 0


def test_clear_is_a_miss(cache: Cache) -> None:
    cache.clear()
    assert cache.match(TOKENS) == 0


def test_wrong_shape_is_refused(cache: Cache) -> None:
    with pytest.raises(errors.InvalidRequest, match="shape"):
        cache.put(TOKENS, KV[:, :, :5])


def test_awaited_put_is_read_back(tmp_root: Path) -> None:
    async def put_and_match() -> int:
        async with kvstore.aio.open(tmp_root / "kv") as store:
            cache = await store.namespace("model", LAYOUT, fingerprint="weights")
            await cache.put(TOKENS, KV)
            return await cache.match(TOKENS)

    assert asyncio.run(put_and_match()) == STORED


def test_worker_serves_what_was_put(tmp_root: Path) -> None:
    command = [sys.executable, "-m", "kvstore.cli.main", "up", "--root", str(tmp_root / "kv")]
    command += ["--etcd-folder", str(tmp_root / "etcd"), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            fields = dict(field.split("=", 1) for field in server.stdout.readline().split()[1:])
            with kvstore.connect(fields["grpc"]) as store:
                cache_in(store).put(TOKENS, KV)
                assert np.array_equal(cache_in(store).get(TOKENS)[1], KV[:, :, :STORED])
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE_S) == 0
        finally:
            server.kill()
