"""The settings of a node's tiers: everything that makes no sense is refused before anything is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.engine.settings import TierSettings
from kvstore.errors import InvalidRequest

MIB = 1 << 20

WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"memory": 1024}, "memory=1.00 KiB: expected 0, or at least 16.00 MiB"),
    ({"memory": -5}, "memory=-5 B: expected 0"),
    ({"memory": "8 gigs"}, "memory='8 gigs': expected bytes"),
    ({"memory": True}, "memory=True"),
    ({"memory": 1e9}, "memory=1000000000.0"),
    ({"disk": ("/d", 64 * MIB)}, "disk without memory"),
    ({"memory": 16 * MIB, "disk": ("/d", 1)}, "disk of 1 B: expected at least 64.00 MiB"),
    ({"memory": 16 * MIB, "disk": "/d:1GiB"}, "disk='/d:1GiB': expected a folder and bytes, such as"),
    ({"memory": "16MiB", "disk": ("/d", "1 gig")}, "expected a folder and bytes"),
    ({"memory": 16 * MIB, "disk": ("", 64 * MIB)}, "expected a folder and bytes"),
    ({"memory": 16 * MIB, "disk": (1, 64 * MIB)}, "expected a folder and bytes"),
    ({"memory": 16 * MIB, "write": "sometimes"}, "write='sometimes': expected one of through, behind"),
)


def test_what_makes_no_sense_is_refused_with_its_name_and_makes_no_root(tmp_root: Path) -> None:
    for given, said in WRONG:
        with pytest.raises(InvalidRequest, match=said):
            kvstore.open(str(tmp_root / "root"), **given)
        assert not (tmp_root / "root").exists()


def test_how_often_peers_are_told_has_bounds() -> None:
    for given in (0.0, -1.0, 3601.0, float("nan")):
        with pytest.raises(InvalidRequest, match=r"sync_interval=.*: expected 0\.05 to 3600 seconds"):
            TierSettings.of(16 * MIB, sync_interval_s=given)


def test_a_disk_may_be_given_as_a_path_and_sizes_as_text(tmp_path: Path) -> None:
    given = TierSettings.of("16MiB", (tmp_path, "0.5 GiB"))  # type: ignore[arg-type]
    assert (given.memory_bytes, given.disk_folder, given.disk_bytes) == (16 * MIB, str(tmp_path), 512 * MIB)
