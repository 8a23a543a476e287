"""``kvstore doctor``: what it finds, and the exit code that follows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result

import kvstore
from kvstore.cli import doctor
from tests.cli.conftest import Run, parsed
from tests.kit.workers import Served, serving


def results(result: Result) -> dict[str, str]:
    return {each["check"]: each["result"] for each in json.loads(result.stdout)["checks"]}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.ENGINES, "vllm", doctor.EngineSupport("numpy", "2", doctor.ENGINES["vllm"].settings))


def test_root_gives_its_bytes_back_and_keeps_none(run: Run, tmp_root: Path) -> None:
    kvstore.open(str(tmp_root)).close()
    found = results(run("doctor", "--root", str(tmp_root), "--json"))
    assert found["store"] == found["round trip of blocks"] == found["round trip of prompts"] == "good"
    assert not list(tmp_root.glob("chunks/*/*"))


def test_engine_settings_name_the_store(run: Run, tmp_root: Path, installed: None) -> None:
    wrapped = {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"root": str(tmp_root)}}
    file = tmp_root.parent / "settings.json"
    file.write_text(json.dumps(wrapped))
    found = results(run("doctor", "--engine", "vllm", "--settings", str(file), "--json"))
    assert found["settings"] == "warning", "without a fingerprint"
    assert found["vllm"] == found["round trip of blocks"] == "good" and "round trip of prompts" not in found


def test_wrong_setting_fails_the_check(run: Run, installed: None) -> None:
    result = run("doctor", "--engine", "vllm", "--settings", '{"rot": "/kv"}', "--json")
    assert result.exit_code == 1 and results(result)["settings"] == "failed" and "rot" in result.stdout


def test_store_that_does_not_answer_fails_the_check(run: Run) -> None:
    result = run("doctor", "--connect", "127.0.0.1:1", "--json")
    assert result.exit_code == 1 and results(result)["store"] == "failed"


def test_block_that_is_not_read_back_fails(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_root: Path) -> None:
    kvstore.open(str(tmp_root)).close()
    monkeypatch.setattr(kvstore.BlockCache, "get", lambda *_: [False])
    result = run("doctor", "--root", str(tmp_root), "--json")
    assert result.exit_code == 1 and results(result)["round trip of blocks"] == "failed"


def test_engine_that_is_not_installed_fails(run: Run) -> None:
    result = run("doctor", "--engine", "sglang", "--json")
    assert result.exit_code == 1 and results(result)["sglang"] == "failed"


@pytest.mark.parametrize("arguments", [("--settings", "{}"), ("--engine", "transformers", "--settings", "{}")])
def test_settings_without_their_engine_are_wrong_use(run: Run, arguments: tuple[str, ...]) -> None:
    assert run("doctor", *arguments).exit_code == 2


@pytest.mark.slow
def test_worker_is_checked_by_its_address(run: Run) -> None:
    served: Served
    with serving() as served:
        checks = parsed(run("doctor", "--connect", served.worker.address, "--json"))["checks"]
    assert {each["result"] for each in checks} == {"good"} and len(checks) == 6
