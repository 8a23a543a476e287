"""Roots on real distributed file systems, each mounted twice: from KVSTORE_TEST_ROOTS, ``/mnt/a=/mnt/b``."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.etcd import eventually
from tests.kit.roots import mounted_roots

TWO_MOUNTS = [pair for pair in mounted_roots() if "=" in pair]
WEAK = ("fuse.glusterfs",)
"""File systems on which a rename into a folder can come after its removal (gc/PROTOCOL.md, F4)."""


@pytest.fixture(params=TWO_MOUNTS or [""])
def two_mounts(request: pytest.FixtureRequest) -> Iterator[list[Path]]:
    """An empty folder of one file system, as each of two mounts names it."""
    if not request.param:
        pytest.skip("KVSTORE_TEST_ROOTS names no file system that is mounted twice, as /mnt/a=/mnt/b")
    name = f"kvstore-test-{uuid.uuid4().hex}"
    folders = [Path(mount) / name for mount in request.param.split("=")]
    folders[0].mkdir()
    eventually(folders[1].is_dir)
    yield folders
    shutil.rmtree(folders[0], ignore_errors=True)


def is_weak(folder: Path) -> bool:
    """True if the file system gives the weak guarantee only."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    around = [(len(point), kind) for point, kind in mounts if folder.is_relative_to(point)]
    return max(around)[1] in WEAK
