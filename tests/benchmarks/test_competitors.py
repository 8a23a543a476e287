"""The comparison with competitors: measurements are verified, and a contender that fails is listed with the reason."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import cli
from benchmarks.competitors import contest, environments
from benchmarks.competitors.contender import ENTRIES, Entry, Workload
from benchmarks.competitors.contest import Contest
from tests.kit.cases import for_each
from tests.kit.patience import slowness

SMALL = Workload("small", layers=2, tensor_bytes=512, chunk_tokens=16, chunk_count=4)
FILES = ENTRIES["files"]


def saboteur(name: str) -> Entry:
    return Entry(name, name, f"tests.benchmarks.saboteurs:{name}")


def play(folder: Path, entries: Sequence[Entry], rounds: int = 1, workload: Workload = SMALL) -> Contest:
    return contest.play(workload, entries, folder, threads=2, rounds=rounds, report=lambda line: None)


def test_competitors_prints_ratios_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(
        "competitors --only kvstore kvstore-blocks memcpy files --size-mib 4 --chunk-mib 2 --long-tokens 64 "
        f"--rounds 2 --json --directory {tmp_path}".split()
    )
    (found,) = json.loads(capsys.readouterr().out)
    assert code == 0
    assert not list(tmp_path.iterdir())
    main, long_prompts, targets = found["tables"]
    assert [row[0] for row in main["rows"]] == ["kvstore", "kvstore, blocks", "memcpy", "plain files"]
    ours = dict(zip(main["columns"], main["rows"][0], strict=True))
    assert ours["kvstore put ratio"] == ours["kvstore get ratio"] == 1
    files = dict(zip(main["columns"], main["rows"][3], strict=True))
    assert all(files[f"kvstore {way} ratio"] > 0 for way in ("put", "get", "view"))
    assert 0 < files["put CPU s/GiB"] < 60
    assert [row[0] for row in long_prompts["rows"]] == ["kvstore"]
    assert {row[-1] for row in targets["rows"]} == {"not measured"}


@for_each(
    "name, reason",
    [
        ("OneBit", "get gave wrong bytes"),
        ("ReadsNothing", "get gave wrong bytes"),
        ("KeepsTheFirst", "round 1: get gave wrong bytes"),
        ("Raises", "get: RuntimeError: out of luck"),
        ("Asserts", "get: AssertionError at saboteurs.py:"),
        ("Dies", "its process ended during get: these are its last words"),
        ("Missing", "has no attribute 'Missing'"),
    ],
)
def test_a_failed_contender_is_listed_with_its_reason(tmp_path: Path, name: str, reason: str) -> None:
    found = play(tmp_path, [saboteur(name), FILES])
    assert reason in found.failures[name]
    assert name not in found.seconds
    assert len(found.seconds["files"]["put"]) == 1
    assert not list(tmp_path.iterdir())


def test_a_hung_contender_is_ended_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "ASK_S", (ask_s := round(slowness(), 1)))
    monkeypatch.setattr(contest, "STOP_S", 0.5)
    found = play(tmp_path, [saboteur("Hangs"), FILES])
    assert f"get took more than {ask_s:g} s" in found.failures["Hangs"]
    assert len(found.seconds["files"]["get"]) == 1


def test_competitors_fails_on_wrong_bytes_of_kvstore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Entry("kvstore", "kvstore", "tests.benchmarks.saboteurs:OneBit")
    monkeypatch.setitem(ENTRIES, "kvstore", wrong)
    code = cli.main(
        "competitors --only kvstore files --size-mib 2 --chunk-mib 2 --long-tokens 0 --rounds 1 "
        f"--directory {tmp_path}".split()
    )
    assert code == 1
    assert "round 0: get gave wrong bytes" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, entry in ENTRIES.items() if entry.environment in environments.ENVIRONMENTS]
)
def test_each_installed_competitor_reads_valid_bytes(tmp_path: Path, name: str) -> None:
    try:
        environments.python_of(ENTRIES[name].environment)
    except environments.NotReady as error:
        pytest.skip(str(error))
    work = Workload("2 MiB", layers=32, tensor_bytes=2048, chunk_tokens=16, chunk_count=3)
    found = play(tmp_path, [ENTRIES[name]], workload=work)
    if "redis-server is not installed" in found.failures.get(name, ""):
        pytest.skip(found.failures[name])
    assert not found.failures
    assert set(found.seconds[name]) == {"put", "get"}


@pytest.mark.slow
@for_each("name", ["kvstore-fsync", "kvstore-grpc", "kvstore-shared", "kvstore-tcp"])
def test_each_path_to_a_worker_reads_valid_bytes(tmp_path: Path, name: str) -> None:
    found = play(tmp_path, [ENTRIES[name]])
    assert not found.failures
    assert "get" in found.seconds[name]
    assert all(each > 0 for each in found.cpu_seconds[name]["get"])
