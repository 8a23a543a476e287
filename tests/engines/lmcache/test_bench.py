"""``lmcache bench l2`` with verification, as users run it: our adapter beside LMCache's own stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.l2 import table


@pytest.mark.slow
def test_lmcaches_own_benchmark_passes_with_every_byte_verified(tmp_root: Path) -> None:
    rows = table([512], keys=16, rounds=2, in_flight=2, repeats=1, directory=tmp_root)
    assert [row.store for row in rows] == ["fs", "fs_native", "kvstore"]
    assert all(row.store_mib_s > 0 and row.load_mib_s > 0 for row in rows)
    assert not list(tmp_root.iterdir())
