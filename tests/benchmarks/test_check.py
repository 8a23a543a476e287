"""The guard against slower paths: it passes an equal path, and fails one that has lost a third."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import check
from kvstore.client.cache import Cache
from tests.kit.cases import for_each

FOUND = {"put": 0.30, "get": 0.90}


@for_each(
    "reference, lines",
    [
        ({"put": 0.30, "get": 0.90}, []),
        ({"put": 0.44, "get": 0.90}, []),  # a loss of less than a third
        ({"put": 0.10}, []),  # faster, and one that the reference does not have
        ({"put": 0.46, "get": 0.90}, ["put: 0.300, the reference is 0.460: slower by more than a third"]),
        ({"put": 0.30, "view": 2.0}, ["view: not measured, and the reference has 2.000"]),
    ],
)
def test_a_loss_of_a_third_fails(reference: dict[str, float], lines: list[str]) -> None:
    assert check.lost(FOUND, reference) == lines


def test_a_disturbance_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = iter([0.1, 0.1, 0.9])
    reference = tmp_path / "reference.json"
    reference.write_text(json.dumps({"ratios": {"get": 0.9}}))
    monkeypatch.setattr(check, "measure", lambda options, size_bytes: {"get": next(ratios)})
    assert check.main(["--reference", str(reference)]) == 0


@pytest.mark.slow
def test_a_slowed_path_fails_against_its_own_reference(
    tmp_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(check, "TRIES", 1)
    reference = tmp_root / "reference.json"
    small = ["--reference", str(reference), "--directory", str(tmp_root), "--size-mib", "8", "--rounds", "1"]
    assert check.main([*small, "--update"]) == 0
    found = json.loads(reference.read_text())["ratios"]
    assert {
        "match of 128k tokens",
        "64 KiB blocks get",
        "in-process view",
        "grpc put",
        "in-process get",
    } <= found.keys()
    assert min(found.values()) > 0
    real = Cache.get

    def slow(self: Cache, *arguments: Any) -> Any:
        time.sleep(1.0)  # far longer than a busy machine made the reference wait
        return real(self, *arguments)

    monkeypatch.setattr(Cache, "get", slow)
    assert check.main(small) == 1
    assert "in-process get: " in capsys.readouterr().err


@pytest.mark.slow
def test_wrong_bytes_are_no_figure(tmp_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(Cache, "get", lambda self, tokens, out=None: len(tokens))
    small = ["--directory", str(tmp_root), "--size-mib", "4", "--rounds", "1", "--reference", str(tmp_root / "r.json")]
    assert check.main([*small, "--update"]) == 1
    assert "wrong bytes" in capsys.readouterr().err
    assert not (tmp_root / "r.json").exists()
