"""One bit changes in a chunk in memory, on the local disk or on the root: no read ever returns it.

The chunk is then read from where it rotted, or moved to the tier below first; for plain and encrypted tenants.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.kit.backends import WAYS, Backend, backend
from tests.kit.patience import eventually
from tests.kit.stores import SMALL, kv_of, same

CHUNKS = 4
SIZE = SMALL.chunk_tokens
TOKENS = np.arange(CHUNKS * SIZE)
KV = kv_of(SMALL, TOKENS)
WITH_MEMORY = [way for way in WAYS if way in ("memory", "disk", "shared")]
HEADER, PAYLOAD = 70, 4096 + 700
"""Positions in an image: what the header says, and the first section."""


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def encrypted(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def filled(made: Backend) -> None:
    made.cache().put(TOKENS, KV)
    made.settle()


def assert_intact(made: Backend, chunks: int = CHUNKS) -> None:
    """Asserts that a read returns at least ``chunks`` chunks, all of them with the bytes that were put."""
    tokens, array = made.cache().get(TOKENS)
    assert same(np.ascontiguousarray(array), np.ascontiguousarray(KV[:, :, :tokens])), "wrong bytes"
    assert tokens >= chunks * SIZE


@pytest.mark.parametrize("at", [HEADER, PAYLOAD])
@pytest.mark.parametrize("index", range(CHUNKS))
@pytest.mark.parametrize("way", WITH_MEMORY)
def test_image_rotten_in_memory_is_read_from_root(
    tmp_root: Path, way: str, index: int, at: int, encrypted: bool
) -> None:
    with backend(way, tmp_root, encrypted=encrypted) as made:
        filled(made)
        assert made.corrupt_memory(made.cache(), TOKENS, index, at)
        assert_intact(made)
        made.assert_idle(["quarantine"])


@pytest.mark.parametrize("index", range(CHUNKS))
def test_image_rotten_in_memory_is_rotten_on_disk(tmp_root: Path, index: int, encrypted: bool) -> None:
    """Memory gives it up to the local disk, where its old checksums are the only guard."""
    with backend("disk", tmp_root, encrypted=encrypted) as made:
        filled(made)
        assert made.corrupt_memory(made.cache(), TOKENS, index, PAYLOAD)
        made.evict_memory()
        eventually(lambda: made.on_disk(made.cache(), TOKENS) == CHUNKS, "all is on the disk")
        assert_intact(made)


@pytest.mark.parametrize("at", [HEADER, PAYLOAD])
@pytest.mark.parametrize("index", range(CHUNKS))
def test_file_rotten_on_disk_is_read_from_root(tmp_root: Path, index: int, at: int, encrypted: bool) -> None:
    with backend("disk", tmp_root, encrypted=encrypted) as made:
        filled(made)
        made.evict_memory()
        eventually(lambda: made.on_disk(made.cache(), TOKENS) == CHUNKS, "all is on the disk")
        assert made.corrupt_disk(made.cache(), TOKENS, index, at)
        assert_intact(made)


@pytest.mark.parametrize("posix", [False, True], ids=["objects", "files"])
@pytest.mark.parametrize("index", [0, CHUNKS - 1])
@pytest.mark.parametrize("way", WAYS)
def test_file_rotten_on_root_is_a_miss_until_next_put(
    tmp_root: Path, way: str, index: int, posix: bool, encrypted: bool
) -> None:
    with backend(way, tmp_root, encrypted=encrypted, posix=posix) as made:
        filled(made)
        made.corrupt_root(made.names(made.cache(), TOKENS)[index], PAYLOAD)
        made.restart()
        if made.way == "disk":
            made.cache().get(TOKENS)
        assert_intact(made, index)
        made.cache().put(TOKENS, KV)
        made.settle()
        assert_intact(made)
