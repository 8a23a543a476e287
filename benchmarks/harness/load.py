"""The bytes that benchmarks move, and the proof that they arrived.

A block from elsewhere must not pass for the expected one, and random gigabytes for every round would take longer to
make than to move. So one random array serves all rounds, and each block of it is stamped. Movers put and get one load
under other tokens or keys in each call, so that a round can move more than memory holds; they prepare and verify
outside the clock.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstore import Layout
from kvstore.client.store import Store
from kvstore.core.buffers import KvArray
from kvstore.engine.settings import Limits

Bytes = npt.NDArray[np.uint8]
Stamps = npt.NDArray[np.uint64]
STAMP_BYTES = 8
POISON = 0xEE
REPEAT_BYTES = 8_388_617


class WrongBytes(Exception):
    """The bytes read are not those written: figures of such a run mean nothing."""


def random_bytes(count: int, seed: int) -> Bytes:
    """Returns random bytes. They repeat with a prime period, so that no two chunks or sections are equal."""
    piece = np.frombuffer(np.random.default_rng(seed).bytes(min(count, REPEAT_BYTES)), np.uint8)
    return np.resize(piece, count)


def stamp_chunks(kv: KvArray, layout: Layout, stamps: Stamps) -> None:
    """Writes ``stamps[i]`` at the start of each section of chunk i, in an array of the layout's shape."""
    raw = kv.view(np.uint8).reshape(layout.layers, 2, kv.shape[2], layout.token_bytes)
    raw[:, :, :: layout.chunk_tokens, :STAMP_BYTES] = _as_bytes(stamps)


def stamped_right(kv: KvArray, layout: Layout, stamps: Stamps) -> bool:
    """True if each section of each chunk starts with its stamp."""
    raw = kv.view(np.uint8).reshape(layout.layers, 2, kv.shape[2], layout.token_bytes)
    return bool((raw[:, :, :: layout.chunk_tokens, :STAMP_BYTES] == _as_bytes(stamps)).all())


def stamp_blocks(blocks: Bytes, stamps: Stamps) -> None:
    """Writes ``stamps[i]`` at the start of row i."""
    blocks[:, :STAMP_BYTES] = _as_bytes(stamps)


def check_equal(found: npt.NDArray[Any], expected: npt.NDArray[Any], what: str) -> None:
    """Compares every byte. Raises WrongBytes."""
    if not np.array_equal(found.view(np.uint8), expected.view(np.uint8)):
        raise WrongBytes(f"{what}: wrong bytes")


def check_count(found: int, expected: int, what: str) -> None:
    """Raises WrongBytes where fewer came back than went in: a miss costs nothing, so it would flatter the figure."""
    if found != expected:
        raise WrongBytes(f"{what}: {found} of {expected}")


def poison(array: npt.NDArray[Any]) -> None:
    """Overwrites an array, so that what an earlier round left there cannot pass for what this one read."""
    array.view(np.uint8).fill(POISON)


def _as_bytes(stamps: Stamps) -> Bytes:
    return stamps.astype("<u8").view(np.uint8).reshape(-1, STAMP_BYTES)


NAMESPACE = "bench"


@dataclass(frozen=True)
class Load:
    """The load of a worker in one call. ``layout`` None: blocks of ``chunk_bytes`` under the engine's own keys."""

    chunk_bytes: int
    chunks: int
    layout: Layout | None
    seed: int

    @property
    def size_bytes(self) -> int:
        """Bytes of one call."""
        return self.chunks * self.chunk_bytes


class Mover(Protocol):
    """Moves one load. Each call has a number, never the same one twice."""

    def prepare(self, call: int) -> None:
        """Makes the call's tokens or keys, and stamps the bytes."""

    def put(self) -> None:
        """Stores all."""

    def get(self) -> None:
        """Reads all into memory of ours."""

    def forget(self) -> None:
        """Overwrites that memory."""

    def verify(self) -> None:
        """Compares every byte of it. Raises WrongBytes."""

    def prepare_one(self, call: int) -> None:
        """Prepares a prompt or list of a single chunk."""

    def put_one(self) -> None:
        """Stores the single chunk."""

    def get_one(self) -> None:
        """Reads the single chunk. Raises WrongBytes if it is not there."""


def mover(store: Store, load: Load) -> Mover:
    """The mover for a load."""
    return ChunkMover(store, load, load.layout) if load.layout else BlockMover(store, load)


class ChunkMover:
    """Prompts, by ``Cache.put`` and ``Cache.get``."""

    def __init__(self, store: Store, load: Load, layout: Layout) -> None:
        self._cache = store.namespace(NAMESPACE, layout)
        self._layout, self._load = layout, load
        self._count = load.chunks * layout.chunk_tokens
        shape = layout.shape(self._count)
        self.kv = random_bytes(load.size_bytes, load.seed).view(layout.numpy_dtype).reshape(shape)
        self.out = np.empty(shape, layout.numpy_dtype)
        poison(self.out)
        self._one = np.ascontiguousarray(self.kv[:, :, : layout.chunk_tokens])
        self._one_out = np.zeros_like(self._one)
        self._tokens = self._one_tokens = np.empty(0, np.uint32)
        self._stored = self._read = 0

    def prepare(self, call: int) -> None:
        self._tokens = self._fresh(call, self._count)
        stamp_chunks(self.kv, self._layout, _stamps(self._load, call))

    def put(self) -> None:
        self._stored = self._cache.put(self._tokens, self.kv).chunks_written

    def get(self) -> None:
        self._read = self._cache.get(self._tokens, self.out)

    def forget(self) -> None:
        poison(self.out)

    def verify(self) -> None:
        check_count(self._stored, self._load.chunks, "chunks written")
        check_count(self._read, self._count, "tokens read")
        check_equal(self.out, self.kv, "get")

    def prepare_one(self, call: int) -> None:
        self._one_tokens = self._fresh(call, self._layout.chunk_tokens, 1)

    def put_one(self) -> None:
        self._cache.put(self._one_tokens, self._one)

    def get_one(self) -> None:
        check_count(self._cache.get(self._one_tokens, self._one_out), len(self._one_tokens), "tokens of one chunk read")

    def _fresh(self, call: int, count: int, kind: int = 0) -> np.typing.NDArray[np.uint32]:
        return np.random.default_rng([self._load.seed, call, kind]).integers(0, 1 << 32, count, np.uint32)


class BlockMover:
    """Opaque blocks, by ``Cache.blocks``."""

    def __init__(self, store: Store, load: Load) -> None:
        # The layout does not describe blocks, but the namespace needs one.
        self._blocks = store.namespace(NAMESPACE, Layout(1, 1, 16, "int8", 16)).blocks
        self._load = load
        self.kv = random_bytes(load.size_bytes, load.seed).reshape(load.chunks, load.chunk_bytes)
        self.out = np.empty_like(self.kv)
        poison(self.out)
        self._keys: list[bytes] = []
        self._one_key: list[bytes] = []
        self._stored: list[bool] = []
        self._read: list[bool] = []
        self._rows, self._out_rows = list(self.kv), list(self.out)
        self._one_out = np.zeros_like(self.kv[0])

    def prepare(self, call: int) -> None:
        self._keys = [self._key(call, at) for at in range(self._load.chunks)]
        stamp_blocks(self.kv, _stamps(self._load, call))

    def put(self) -> None:
        self._stored = self._blocks.put(self._keys, self._rows)

    def get(self) -> None:
        self._read = self._blocks.get(self._keys, self._out_rows)

    def forget(self) -> None:
        poison(self.out)

    def verify(self) -> None:
        check_count(sum(self._stored), self._load.chunks, "blocks written")
        check_count(sum(self._read), self._load.chunks, "blocks read")
        check_equal(self.out, self.kv, "get")

    def prepare_one(self, call: int) -> None:
        self._one_key = [self._key(call, -1)]

    def put_one(self) -> None:
        self._blocks.put(self._one_key, self._rows[:1])

    def get_one(self) -> None:
        if self._blocks.get(self._one_key, [self._one_out]) != [True]:
            raise WrongBytes("a block that was just put is not there")

    def _key(self, call: int, at: int) -> bytes:
        return hashlib.blake2b(f"{self._load.seed}/{call}/{at}".encode(), digest_size=32).digest()


class FileMover:
    """A file for each chunk, without names, order or verification: what a file system gives to a program that fills
    an array as large as its data, with as many threads as a store has.
    """

    def __init__(self, folder: Path, load: Load) -> None:
        self._folder, self._load = folder, load
        self._folder.mkdir(exist_ok=True)
        self._pool = ThreadPoolExecutor(Limits().width)
        self.kv = random_bytes(load.size_bytes, load.seed).reshape(load.chunks, load.chunk_bytes)
        self.out = np.empty_like(self.kv)
        poison(self.out)
        self._one_out = np.zeros_like(self.kv[0])
        self._call = self._one = 0
        self._written = self._read = 0

    def prepare(self, call: int) -> None:
        self._call = call
        stamp_blocks(self.kv, _stamps(self._load, call))

    def put(self) -> None:
        self._written = sum(self._pool.map(self._write_run, self._runs()))

    def get(self) -> None:
        self._read = sum(self._pool.map(self._read_run, self._runs()))

    def forget(self) -> None:
        poison(self.out)

    def verify(self) -> None:
        check_count(self._written, self._load.size_bytes, "bytes written")
        check_count(self._read, self._load.size_bytes, "bytes read")
        check_equal(self.out, self.kv, "get")

    def prepare_one(self, call: int) -> None:
        self._one = call

    def put_one(self) -> None:
        self._write(f"{self._load.seed}-one-{self._one}", self.kv[0])

    def get_one(self) -> None:
        self._read_into(f"{self._load.seed}-one-{self._one}", self._one_out)

    def close(self) -> None:
        """Ends its threads."""
        self._pool.shutdown()

    def _runs(self) -> list[range]:
        executor = Limits().width
        return [range(number, self._load.chunks, executor) for number in range(executor)]

    def _write_run(self, run: range) -> int:
        return sum(self._write(self._name(index), self.kv[index]) for index in run)

    def _read_run(self, run: range) -> int:
        return sum(self._read_into(self._name(index), self.out[index]) for index in run)

    def _name(self, index: int) -> str:
        return f"{self._load.seed}-{self._call}-{index}"

    def _write(self, name: str, payload: Bytes) -> int:
        file = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            return os.writev(file, [payload.data])
        finally:
            os.close(file)

    def _read_into(self, name: str, payload: Bytes) -> int:
        file = os.open(self._folder / name, os.O_RDONLY)
        try:
            return os.readv(file, [payload.data])
        finally:
            os.close(file)


def _stamps(load: Load, call: int) -> Stamps:
    """One number for each chunk, that no other chunk of any worker, round or call has."""
    assert load.chunk_bytes >= STAMP_BYTES and load.chunks < 1 << 24
    first = np.uint64(load.seed << 44 | call << 24)
    return first + np.arange(load.chunks, dtype=np.uint64)


# KV shapes of widely used models: the size of one token decides which chunk sizes are worth measuring.


@dataclass(frozen=True)
class Model:
    """Shape of the KV of one token, 16-bit; ``prefill_tokens_per_s`` as published for one GPU, 0 where it is not."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    prefill_tokens_per_s: int = 0

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2

    def layout(self, chunk_tokens: int) -> Layout:
        """Returns the layout with chunks of this many tokens."""
        return Layout(self.layers, self.kv_heads, self.head_dim, "bfloat16", chunk_tokens)

    def layout_of(self, chunk_bytes: int) -> Layout:
        """The layout with chunks of at most ``chunk_bytes``, at least one token."""
        return self.layout(max(1, chunk_bytes // self.bytes_per_token))


# Prefill rates: 8,192 tokens in 0.84, 0.40, 1.08 and 0.89 s, as the authors of remote_kv_cache published them.
QWEN_32B = Model("Qwen2.5-32B", 64, 8, 128, 2_220)
QWEN_7B = Model("Qwen2.5-7B", 28, 4, 128, 9_752)
QWEN_3B = Model("Qwen2.5-3B", 36, 2, 128, 20_480)
GLM_9B = Model("glm-4-9b", 40, 4, 128, 7_585)
LLAMA_8B = Model("Llama-3.1-8B", 32, 8, 128, 9_204)
DENSE = Model("dense without GQA", 80, 128, 128)
"""5 MiB a token, as in Vineyard's own benchmark."""
SMALL = Model("32 KiB a token", 16, 4, 128)

MODELS = {each.name: each for each in (QWEN_32B, QWEN_7B, QWEN_3B, GLM_9B, LLAMA_8B, DENSE, SMALL)}
BLOCK_MODELS = (QWEN_32B, QWEN_7B, QWEN_3B, GLM_9B, LLAMA_8B)
"""The five of the remote_kv_cache table."""
