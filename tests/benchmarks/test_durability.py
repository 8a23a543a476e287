"""The benchmark of durabilities: its table, and that it compares what it stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import durability
from benchmarks.contents import WrongBytes
from kvstore.client.cache import Cache
from kvstore.writes import Durability


def test_each_durability_is_measured_beside_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--seconds", "0.05", "--rounds", "1", "--rates-mib", "1000", "--disk", str(tmp_path), "--json"]
    assert durability.main(given) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["durability"] for row in rows] == [each.value for each in Durability]
    assert all(row["mib_s"] > 0 and row["put_p99_ms"] >= row["put_p50_ms"] > 0 for row in rows)
    none = rows[0]
    assert none["ratio"] == none["ratio_min"] == none["ratio_max"] == 1
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_byte_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got = Cache.get

    def flipping(cache: Cache, tokens: Any) -> Any:
        count, kv = got(cache, tokens)
        kv.view("u1").flat[-1] ^= 1
        return count, kv

    monkeypatch.setattr(Cache, "get", flipping)
    with pytest.raises(WrongBytes, match="fsync"):
        durability.turn(tmp_path, "fsync", 0, 0.01, [])


def test_a_disk_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert durability.main(["--disk", "/nowhere"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
