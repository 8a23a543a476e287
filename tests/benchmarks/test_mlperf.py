"""The replay of MLPerf's trace, and kvstore as the storage tier of its benchmark."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import mlperf
from benchmarks.harness.load import WrongBytes
from benchmarks.mlperf import Backend, operations, replay
from tests.benchmarks.sizes import tiny_options

TRACE = """Timestamp,Operation,Object_Size_Bytes,Tier,Key,Phase
1.0,Read,9000,Tier-2,before,Decode
1.1,Write,9000,Tier-2,a,Prefill
1.2,Write,9000,Tier-0,fast,Prefill
1.3,Write,2000000,Tier-2,b,Prefill
1.4,Read,9000,Tier-2,a,Decode
1.5,Read,2000000,Tier-2,b,Decode
"""


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mlperf, "PART_BYTES", 1 << 19)
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    return file


def test_replay_measures_both_stores(trace: Path, tmp_root: Path) -> None:
    found = list(operations(trace, 2))
    assert [(each.is_read, each.size, each.key) for each in found] == [
        *((False, 4500, "a"), (False, 1_000_000, "b"), (True, 4500, "a"), (True, 1_000_000, "b"))
    ]
    table = replay(tiny_options(tmp_root), found, 1 << 30, 2)
    assert [row[0] for row in table.rows] == ["kvstore", "files"]
    assert all(isinstance(cell, float) and cell > 0 for row in table.rows for cell in row[1:])


def test_replay_after_a_miss_fails(trace: Path, tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlperf.Blocks, "write", lambda self, key, data: None)
    with pytest.raises(WrongBytes, match="is a miss"):
        replay(tiny_options(tmp_root), list(operations(trace, 1)), 1 << 30, 1)


def test_backend_counts_misses(trace: Path, tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_MLPERF_BYTES", str(1 << 30))
    backend = Backend(str(tmp_root))
    data = np.arange(400_000, dtype=np.float32).reshape(2, -1)
    backend.write("one", data)
    found, timing = backend.read("one")
    assert np.array_equal(found, data) and timing.total > 0
    monkeypatch.setattr(backend._blocks, "read", lambda key, out: (_ for _ in ()).throw(KeyError(key)))
    with pytest.raises(KeyError):
        backend.read("one")
    assert backend.misses == 1
    backend.delete("one")
    backend.close()
