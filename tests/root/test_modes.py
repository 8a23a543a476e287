"""Modes of what a root gets: nothing is for others, and a group gets what the umask leaves it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.root.posix import PosixRoot
from tests.kit.stores import TINY, fresh, kv_of, store_on


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


class NotNative(PosixRoot):
    """A root whose files only Python writes."""


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_a_root_is_for_its_owner_and_group(tmp_path: Path, native: bool) -> None:
    for mask, file, folder in ((0o022, 0o640, 0o750), (0o002, 0o660, 0o770), (0, 0o660, 0o770)):
        place = fresh(tmp_path)
        root, tokens = place / "root", np.arange(4 * TINY.chunk_tokens)
        with umask(mask):
            if native:
                store = kvstore.open(str(root))
            else:
                root.mkdir(folder)
                store = store_on(NotNative(root))
            with store:
                cache = store.namespace("m", TINY)
                assert cache.put(tokens, kv_of(TINY, tokens)).chunks_written == 4
                assert cache.blocks.put([b"k" * 16], [bytes(100)]) == [True]
        found = [root, *root.rglob("*")]
        assert sum(each.is_file() and "chunks" in each.parts for each in found) == 5
        assert {stat.S_IMODE(each.stat().st_mode) for each in found if each.is_file()} == {file}
        assert {stat.S_IMODE(each.stat().st_mode) for each in found if each.is_dir()} == {folder}
