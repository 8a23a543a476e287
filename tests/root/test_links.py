"""Folders of a root that are symbolic links: what would be written there goes to somebody else, so it is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.errors import RootMismatch, Unavailable
from kvstore.format.places import FOLDERS, Name
from kvstore.root.posix import PosixRoot
from tests.kit.stores import fresh

LAYOUT = kvstore.Layout(layers=1, kv_heads=1, head_dim=4, dtype="int8", chunk_tokens=4)


def test_a_root_with_a_folder_that_is_a_link_is_refused(tmp_root: Path) -> None:
    for exists in (True, False):
        for link in sorted(FOLDERS):
            folder = fresh(tmp_root)
            root, elsewhere = folder / "root", folder / "elsewhere"
            kvstore.open(root, max_bytes=None).close()
            if (root / link).exists():
                (root / link).rename(folder / "before")
            if exists:
                elsewhere.mkdir()
            (root / link).symlink_to(elsewhere)
            with pytest.raises(RootMismatch, match=rf"{link} is a symbolic link: .* remove the link"):
                kvstore.open(root)
            (root / link).unlink()
            if (folder / "before").exists():
                (folder / "before").rename(root / link)
            with kvstore.open(root) as store:
                assert (
                    store.namespace("m", LAYOUT).put(range(4), np.zeros(LAYOUT.shape(4), np.int8)).chunks_written == 1
                )


@pytest.mark.parametrize("link", ["staging", "chunks"])
def test_nothing_is_written_through_a_link_that_comes_later(tmp_root: Path, link: str) -> None:
    root, elsewhere = PosixRoot(tmp_root / "root"), tmp_root / "elsewhere"
    (tmp_root / "root").mkdir()
    elsewhere.mkdir()
    (tmp_root / "root" / link).symlink_to(elsewhere)
    with pytest.raises(Unavailable, match="is a symbolic link"):
        root.stage(Name(f"{link}/ab/1.part"), [memoryview(b"x")], stamp_ns=0, durable=False)
    assert list(elsewhere.iterdir()) == []
