"""The workers benchmark: worker processes, fio's figures beside ours, and checks that can fail."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import caching
from benchmarks.case import Case, measure
from benchmarks.contents import WrongBytes
from benchmarks.rounds import MIB
from tests.kit.cases import for_each

pytestmark = pytest.mark.slow
SMALL = Case(workers=2, size_bytes=8 * MIB)


def truncate_one(root: Path) -> None:
    """Damages the first chunk found."""
    os.truncate(caching.files(root / "chunks")[0], 5000)


def test_workers_move_their_bytes_and_are_counted(tmp_root: Path) -> None:
    found = measure(SMALL, tmp_root, rounds=2, with_fio=False)
    for kind in ("write", "read"):
        assert len(found.aggregate[kind]) == 2 and min(found.aggregate[kind]) > 0
        assert min(found.cpu_s_per_gib[kind]) > 0
        # Both move as much, and the slower one's time counts for both.
        assert found.median(kind) * 1024 <= 2.01 * max(found.per_worker[kind]) * 2
    assert len(found.singles) == 2
    assert found.ratio("write") is None and found.ratio_direct() is None
    assert not (tmp_root / "root").exists()


def test_damage_between_put_and_get_ends_the_benchmark(tmp_root: Path) -> None:
    with pytest.raises(WrongBytes, match=r"tokens read: (0|16) of 32"):
        measure(SMALL, tmp_root, 1, with_fio=False, between=lambda: truncate_one(tmp_root / "root"))


@for_each("path", ["grpc", "shared", "tcp"])
def test_each_way_to_a_worker_is_measured(tmp_root: Path, path: str) -> None:
    found = measure(replace(SMALL, path=path), tmp_root, 1, with_fio=False)
    assert found.median("read") > 0
    assert found.cpu_s_per_gib["read"][0] > 0
