"""A KV store in 100 lines: prefixes in chunks on a shared folder, verified reads, eviction. Needs numpy and xxhash.

It has the core of kvstore: chained keyed addresses, one file per chunk, publication by link, a checksum per file.
docs/how-it-works.md lists what it lacks.
"""

import os
import struct
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest as checksum

HEAD = struct.Struct("<8s16sQ")
MAGIC = b"TINYKV\x00\x01"


class TinyStore:
    """KV of prompts, of shape (layers, 2, tokens, heads, head_dim), in files below one folder."""

    def __init__(self, folder: str, model: str, shape: tuple[int, int, int], chunk_tokens: int = 256) -> None:
        self.chunks, self.staging = Path(folder) / "chunks", Path(folder) / "staging"
        self.chunks.mkdir(parents=True, exist_ok=True)
        self.staging.mkdir(exist_ok=True)
        self.layers, self.heads, self.head_dim = shape
        self.chunk_tokens = chunk_tokens
        # Everything that changes the bytes is part of the key, so two models never share an address.
        self.key = blake2b(repr((model, shape, chunk_tokens)).encode(), digest_size=32).digest()

    def addresses(self, tokens: Sequence[int]) -> list[bytes]:
        """Returns the address of each full chunk: a hash of its tokens and of the address before it."""
        found = [bytes(16)]
        for start in range(0, len(tokens) - self.chunk_tokens + 1, self.chunk_tokens):
            chunk = np.asarray(tokens[start : start + self.chunk_tokens], "<u4").tobytes()
            found.append(blake2b(found[-1] + chunk, digest_size=16, key=self.key).digest())
        return found[1:]

    def put(self, tokens: Sequence[int], kv: npt.NDArray[np.float16]) -> int:
        """Stores all full chunks, parents first; returns the number of their tokens."""
        addresses = self.addresses(tokens)
        for number, address in enumerate(addresses):
            start = number * self.chunk_tokens
            payload = kv[:, :, start : start + self.chunk_tokens].tobytes()
            staged = self.staging / uuid.uuid4().hex
            staged.write_bytes(HEAD.pack(MAGIC, address, checksum(payload)) + payload)
            with suppress(FileExistsError):  # the first writer wins, so a published file never changes
                os.link(staged, self.chunks / address.hex())
            staged.unlink()
        self._touch(addresses)
        return len(addresses) * self.chunk_tokens

    def match(self, tokens: Sequence[int]) -> int:
        """Returns how many leading tokens are stored; a get may still find fewer."""
        addresses = self.addresses(tokens)
        missing = [number for number, each in enumerate(addresses) if not (self.chunks / each.hex()).exists()]
        return min(missing, default=len(addresses)) * self.chunk_tokens

    def get(self, tokens: Sequence[int]) -> tuple[int, npt.NDArray[np.float16]]:
        """Returns the longest stored prefix, verified: the number of its tokens, and its KV."""
        parts = [np.empty((self.layers, 2, 0, self.heads, self.head_dim), np.float16)]
        addresses = self.addresses(tokens)
        for address in addresses:
            path = self.chunks / address.hex()
            if not path.exists():
                break
            content = path.read_bytes()
            payload = content[HEAD.size :]
            if content[: HEAD.size] != HEAD.pack(MAGIC, address, checksum(payload)):
                path.unlink()  # corrupt: a miss, and the next put writes it again
                break
            chunk = np.frombuffer(payload, np.float16)
            parts.append(chunk.reshape(self.layers, 2, self.chunk_tokens, self.heads, self.head_dim))
        self._touch(addresses[: len(parts) - 1])
        return (len(parts) - 1) * self.chunk_tokens, np.concatenate(parts, axis=2)

    def evict(self, max_bytes: int) -> int:
        """Deletes the least recently used chunks until the rest fits; returns how many."""
        files = sorted((path.stat().st_mtime_ns, path.stat().st_size, path) for path in self.chunks.iterdir())
        used, kept = sum(size for _, size, _ in files), len(files)
        for _, size, path in files:
            if used <= max_bytes:
                break
            path.unlink()
            used, kept = used - size, kept - 1
        return len(files) - kept

    def _touch(self, addresses: list[bytes]) -> None:
        now_ns = time.time_ns()
        for number, address in enumerate(addresses):  # a parent is newer than its child, so tails are evicted first
            os.utime(self.chunks / address.hex(), ns=(now_ns - 1000 * number, now_ns - 1000 * number))
