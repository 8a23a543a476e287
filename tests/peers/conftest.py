"""A store and its cache for each test, on its own root."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore.client import Cache, Store
from tests.kit.peers import cache_of


@pytest.fixture
def store(tmp_root: Path) -> Iterator[Store]:
    with kvstore.open(str(tmp_root)) as opened:
        yield opened


@pytest.fixture
def cache(store: Store) -> Cache:
    return cache_of(store)


@pytest.fixture
def small_root(tmp_path: Path) -> Iterator[Path]:
    """A root on a file system of 4 MiB, where this user may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "kvstore-test", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"may not mount a small file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=60)
