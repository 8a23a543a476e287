"""A local disk tier for tests, with its own clock and a root that can fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.census.selection import ClearOrder
from kvstore.core.clock import RandomIds
from kvstore.core.executor import Deadline
from kvstore.core.metrics import Counters
from kvstore.core.namespace import Namespace
from kvstore.core.recency import Hints
from kvstore.format.header import Expected
from kvstore.format.keyset import ChunkKeys
from kvstore.root.interface import Root
from kvstore.root.posix import PosixRoot
from kvstore.tiers.disk import DiskTier
from tests.kit.fake_meta import FakeClock
from tests.kit.faulty_root import FaultyRoot, Rule
from tests.kit.images import encoded
from tests.kit.patience import eventually
from tests.kit.stores import TINY

NAMESPACE = Namespace.of("m", TINY)
OTHER = Namespace.of("other", TINY)
CHUNKS = 12
MIB = 1 << 20


def chain_of(seed: int = 0, chunks: int = CHUNKS, namespace: Namespace = NAMESPACE) -> ChunkKeys:
    return ChunkKeys.of(namespace, np.arange(chunks * TINY.chunk_tokens, dtype=np.uint32) + np.uint32(seed * 1_000_000))


def image_as(expected: Expected) -> memoryview:
    """The image of a chunk, whose bytes its address determines."""
    generator = np.random.default_rng(int.from_bytes(expected.address[:8], "little"))
    return memoryview(encoded(expected, generator.bytes(expected.payload_bytes)))


def image_of(chain: ChunkKeys, index: int) -> memoryview:
    return image_as(chain.expected(index))


def is_right(image: bytearray, chain: ChunkKeys, index: int) -> bool:
    return bytes(image) == bytes(image_of(chain, index))


IMAGE_BYTES = len(image_of(chain_of(), 0))
FILE_BYTES = (-(-IMAGE_BYTES // 4096) + 1) * 4096
"""What one is charged."""


class Disk:
    """A tier on a folder, with its parts."""

    def __init__(
        self,
        path: Path,
        files: int = 100,
        *,
        size_bytes: int | None = None,
        rules: Sequence[Rule] = (),
        step: Callable[[str], None] | None = None,
        root_id: bytes = b"",
    ) -> None:
        self.path = path
        self._rules, self._step = rules, step
        self.clock = FakeClock()
        self.clock.advance(1_700_000_000.0 - self.clock.now_s())
        self.counters = Counters()
        self.root: FaultyRoot | None = None
        self.tier = DiskTier(
            str(path),
            files * FILE_BYTES if size_bytes is None else size_bytes,
            self.counters,
            self.clock,
            RandomIds(),
            make_root=self._faulty,
            root_id=root_id,
        )

    def _faulty(self, path: str) -> Root:
        self.root = FaultyRoot(PosixRoot(path, step=self._step), self._rules)
        return self.root

    def add(self, chain: ChunkKeys, *indexes: int, hints: Hints | None = None) -> list[bool]:
        given = {} if hints is None else {"hints": hints}
        return [self.tier.add(chain.place(index), image_of(chain, index), **given) for index in indexes]

    def fetch(self, chain: ChunkKeys, *indexes: int, deadline_s: float = 10.0) -> list[bytearray | None]:
        images = [bytearray(IMAGE_BYTES) for _ in indexes]
        deadline = Deadline(self.clock, deadline_s)
        came = self.tier.fetch(chain, indexes, [memoryview(image) for image in images], deadline)
        return [image if whole else None for image, whole in zip(images, came, strict=True)]

    def has(self, chain: ChunkKeys, *indexes: int) -> bool:
        """True if these chunks are there, and their bytes right."""
        found = self.fetch(chain, *indexes)
        pairs = zip(found, indexes, strict=True)
        return all(image is not None and is_right(image, chain, index) for image, index in pairs)

    def clear(self, namespace: Namespace = NAMESPACE) -> None:
        self.tier.drop_ordered([ClearOrder(frozenset({namespace.id}), self.clock.now_s())])

    def count(self, name: str) -> int:
        return self.counters.snapshot()[name]

    def rules(self, *rules: Rule) -> None:
        assert self.root is not None
        self.root.set_rules(rules)

    def wait_refilled(self) -> None:
        eventually(lambda: not self.tier.stats()["disk_refilling"])


@contextmanager
def disk_on(path: Path, files: int = 100, **settings: Any) -> Iterator[Disk]:
    disk = Disk(path, files, **settings)
    disk.tier.open()
    disk.tier.refill()
    try:
        disk.wait_refilled()
        yield disk
    finally:
        disk.tier.close()


def files_under(path: Path) -> list[Path]:
    """Chunk files, staged ones too."""
    return [file for part in ("chunks", "staging") for file in (path / part).rglob("*") if file.is_file()]


def bytes_under(path: Path) -> int:
    total = 0
    for file in files_under(path):
        try:
            total += file.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total
