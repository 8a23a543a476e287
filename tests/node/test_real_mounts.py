"""Real file systems that fill up, turn read-only, freeze or vanish under a store. Needs root, for mounting."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvstore
from kvstore import Layout
from kvstore.client.cache import Cache
from kvstore.client.store import Store
from kvstore.engine.settings import Limits
from kvstore.errors import Overloaded, Unavailable
from kvstore.format import places
from tests.kit.patience import eventually, stretched
from tests.kit.stores import kv_of, same, store_on

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root"),
]

LAYOUT = Layout(layers=2, kv_heads=4, head_dim=64, dtype="int8", chunk_tokens=64)
QUICK = Limits(match_deadline_s=1.0, read_deadline_s=1.0, write_deadline_s=1.0, stall_s=1.0)
DEADLINES = ("match_deadline_s", "read_deadline_s", "write_deadline_s", "stall_s")
TOKENS = np.arange(4 * LAYOUT.chunk_tokens)
KV = kv_of(LAYOUT, TOKENS)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(command)} does not work here: {done.stderr.strip()}")


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "tmpfs"
    mount.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount))
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture
def loop_ext4(tmp_path: Path) -> Iterator[Path]:
    for tool in ("mkfs.ext4", "fsfreeze"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    image, mount = tmp_path / "image", tmp_path / "ext4"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    run("mkfs.ext4", "-q", str(image))
    run("mount", "-o", "loop", str(image), str(mount))
    yield mount / "root"
    subprocess.run(["fsfreeze", "-u", str(mount)], capture_output=True, check=False)
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture
def store(loop_ext4: Path) -> Iterator[Store]:
    """A store on a file system of its own, with deadlines that what is not frozen meets."""
    with store_on(loop_ext4, stretched(QUICK, *DEADLINES)) as opened:
        yield opened


def stored(cache: Cache, tokens: npt.NDArray[Any], kv: npt.NDArray[Any]) -> None:
    """Puts a prompt, again while the root is slow, as ``Unavailable`` asks for."""

    def put() -> bool:
        try:
            return cache.put(tokens, kv).tokens_present == len(tokens)
        except Unavailable:
            return False

    eventually(put, "the put")


def loaded(cache: Cache, tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Gets a prompt, again while the root is slow and so it is a miss."""
    found: list[npt.NDArray[Any]] = []

    def get() -> bool:
        count, array = cache.get(tokens)
        found.append(array)
        return count == len(tokens)

    eventually(get, "the get")
    return found[-1]


def test_a_full_disk_is_overloaded_and_keeps_what_was_there(small_tmpfs: Path) -> None:
    with store_on(small_tmpfs) as store:
        cache = store.namespace("m", LAYOUT)
        cache.put(TOKENS, KV)
        big = np.arange(1000, 1000 + 128 * LAYOUT.chunk_tokens)
        kv = kv_of(LAYOUT, big)
        with pytest.raises(Overloaded, match="free space on the root"):
            cache.put(big, kv, required=True)
        assert same(cache.get(TOKENS)[1], KV)
        count, found = cache.get(big)
        assert 0 < count < len(big) and same(found, kv[:, :, :count]), "what fitted is there and right"
        assert not list(small_tmpfs.glob("staging/*/*")), "no torn file keeps the disk full"
        cache.clear()
        assert cache.put(TOKENS, KV).tokens_present == len(TOKENS)


def test_a_full_disk_can_be_cleared_where_its_metadata_need_room_too(tmp_path: Path) -> None:
    """On a folder of one host the metadata's log grows before anything is deleted: the reserve is for that."""
    mount, tiny = tmp_path / "tmpfs", Layout(layers=1, kv_heads=1, head_dim=64, dtype="float16", chunk_tokens=32)
    mount.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount))
    try:
        tokens = np.arange(3 * tiny.chunk_tokens)
        with kvstore.open(mount / "root", max_bytes=None) as store:
            cache, at = store.namespace("m", tiny), 0
            while cache.put(tokens + at, kv_of(tiny, tokens)).reason != "full":
                at += len(tokens)
            assert (mount / "root" / places.RESERVE).exists()
            assert cache.clear().chunks > 1000
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_root_unmounted_under_the_store_is_misses_and_fills_no_mount_point(store: Store, loop_ext4: Path) -> None:
    mount, image = loop_ext4.parent, loop_ext4.parent.parent / "image"
    cache = store.namespace("m", LAYOUT)
    stored(cache, TOKENS, KV)
    run("umount", "-l", str(mount))
    more = np.concatenate([TOKENS, TOKENS])
    kv = kv_of(LAYOUT, more)
    with pytest.raises(Unavailable, match="mounted"):
        cache.put(more, kv)
    assert cache.get(more)[0] == 0
    assert list(mount.iterdir()) == [], "the bare mount point stays as it was"
    run("mount", "-o", "loop", str(image), str(mount))
    stored(cache, more, kv)
    assert same(loaded(cache, more), kv)
