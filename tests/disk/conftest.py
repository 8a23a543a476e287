"""Fixtures of the local disk tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.disks import Disk, disk_on


@pytest.fixture
def folder(tmp_root: Path) -> Path:
    return tmp_root / "disk"


@pytest.fixture
def disk(folder: Path) -> Iterator[Disk]:
    with disk_on(folder) as opened:
        yield opened
