"""Engine-hashed blocks go the same ways as prompts, and the results are the same whichever way that is."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.client.limits import ClientLimits
from kvstore.client.store import Store
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.worker.limits import WorkerLimits
from tests.bulk.memories import serving_memory
from tests.bulk.ways import MEDIUM, WAYS
from tests.worker.serving import Served, connected, eventually, serving

pytestmark = pytest.mark.slow
SIZES = (1, 4096, 100_000, 65_537, 3, 1 << 20)
COUNT = 150
"""More blocks than one WANT asks for, of more bytes than one run has."""
KINDS = ("files", "no files", "memory", "memory and files")
Bytes = npt.NDArray[np.uint8]


def keys_of(seed: int, count: int = COUNT) -> list[bytes]:
    return [hashlib.blake2b(f"{seed}/{at}".encode(), digest_size=16 + at % 49).digest() for at in range(count)]


def blocks_of(seed: int, count: int = COUNT, sizes: tuple[int, ...] = SIZES) -> list[Bytes]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, sizes[at % len(sizes)], np.uint8) for at in range(count)]


def buffers_for(blocks: list[Bytes]) -> list[Bytes]:
    return [np.zeros_like(block) for block in blocks]


def same(buffers: list[Bytes], blocks: list[Bytes]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(buffers, blocks, strict=True))


def counted(store: Store, what: str) -> dict[str, int]:
    """How often each way was taken."""
    stats = store.stats()
    return {way: int(stats[f"client_{what}_{way}"]) for way in WAYS if stats[f"client_{what}_{way}"]}


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, module_root: Path) -> Iterator[Served]:
    root = MemoryRoot(MemoryFiles()) if request.param in ("no files", "memory") else module_root
    with serving_memory(root, 256 << 20) if "memory" in request.param else serving(root) as found:
        yield found
        eventually(lambda: found.worker.service.in_flight.count == 0, "all memory is given back")
        assert found.worker.service.counters()["calls_failed"] == 0
        assert not found.worker.service.bulk_requests.leases


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("reader", WAYS)
@pytest.mark.parametrize("writer", WAYS)
def test_what_one_way_wrote_every_way_reads(served: Served, writer: str, reader: str, deferred: bool) -> None:
    """Blocks of mixed sizes, more than one WANT asks for."""
    seed = zlib.crc32(f"{writer} {reader} {deferred}".encode())
    keys, blocks = keys_of(seed), blocks_of(seed)
    with connected(served, bulk=writer, deferred=deferred) as store:
        assert store.namespace("m", MEDIUM).blocks.put(keys, blocks) == [True] * COUNT
        assert counted(store, "puts") == {writer: 1}
    with connected(served, bulk=reader) as store:
        cache = store.namespace("m", MEDIUM).blocks
        buffers = buffers_for(blocks)
        assert cache.get(keys, buffers) == [True] * COUNT
        assert same(buffers, blocks)
        with cache.hold(keys) as hold:
            buffers = buffers_for(blocks)
            assert hold.get(keys[3:20], buffers[3:20]) == [True] * 17
            assert same(buffers[3:20], blocks[3:20])
        assert counted(store, "gets") == {reader: 2}
        assert store.stats()["client_bulk_broken"] == 0
