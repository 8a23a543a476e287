"""One bit changes in a chunk on its way to the local disk, or there: no read ever returns it.

For plain and encrypted tenants; damage of memory and of the root is among the random events of ``test_model``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.kit.backends import Backend, backend
from tests.kit.patience import eventually
from tests.kit.stores import SMALL, kv_of, same

CHUNKS = 4
TOKENS = np.arange(CHUNKS * SMALL.chunk_tokens)
KV = kv_of(SMALL, TOKENS)
HEADER, PAYLOAD = 70, 4096 + 700
"""Positions in an image: what the header says, and the first section."""


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def encrypted(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def filled(made: Backend) -> None:
    made.cache().put(TOKENS, KV)
    made.settle()


def assert_intact(made: Backend) -> None:
    """Asserts that a read returns all chunks, with the bytes that were put."""
    tokens, array = made.cache().get(TOKENS)
    assert same(np.ascontiguousarray(array), np.ascontiguousarray(KV[:, :, :tokens])), "wrong bytes"
    assert tokens == len(TOKENS)


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
