"""``kvstore replay``: figures, exit codes, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kvstore.client.cache import Cache
from kvstore.replay import expect, generate
from kvstore.replay.trace import BLOCK_TOKENS
from tests.cli.conftest import KVSTORE, PATIENCE_S, SOURCE, Run, eventually, parsed
from tests.kit.cases import for_each
from tests.replay.test_trace import write_trace

pytestmark = pytest.mark.slow


REQUESTS = generate(60, seed=4)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    write_trace(tmp_path / "trace.jsonl", REQUESTS)
    return str(tmp_path / "trace.jsonl")


def test_without_a_store_it_uses_a_temporary_root_and_removes_it(
    run: Run, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    expected = expect(REQUESTS)
    found = parsed(run("replay", trace, "--bytes-per-token", "8", "--json"))
    assert found["ok"] is True and found["wrong_bytes"] == 0 and found["failures"] == []
    assert found["tokens_matched"] == found["tokens_expected"] == expected.blocks * BLOCK_TOKENS > 0
    assert found["chunks_written"] == found["chunks_unique"] == expected.chunks_unique
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]


def test_on_a_root_it_leaves_no_chunks_unless_told_to(run: Run, trace: str, tmp_root_url: str) -> None:
    at = ("--root", tmp_root_url, "--bytes-per-token", "8", "--json")
    parsed(run("replay", trace, *at))
    kept = parsed(run("replay", trace, *at, "--keep", "--namespace", "kept"))
    chunks = {each["name"]: each["chunks"] for each in parsed(run("ls", *at[:2], "--json"))["namespaces"]}
    assert chunks.pop("kept") == kept["chunks_written"]
    assert set(chunks.values()) == {0}

    again = run("replay", trace, *at, "--namespace", "kept")
    assert again.exit_code == 2 and "holds chunks of this trace already" in again.stderr
    chunks = {each["name"]: each["chunks"] for each in parsed(run("ls", *at[:2], "--json"))["namespaces"]}
    assert chunks["kept"] == kept["chunks_written"], "a namespace that was there before is never cleared"


def test_a_wrong_byte_is_exit_code_1(run: Run, trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Cache.get

    def flipped(cache: Cache, tokens: Any, out: Any) -> int:
        got = honest(cache, tokens, out=out)
        out[0, 0, 0, 0, 0] ^= 1
        return got

    monkeypatch.setattr(Cache, "get", flipped)
    result = run("replay", trace, "--bytes-per-token", "8", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["ok"] is False and found["wrong_bytes"] == found["wrong_requests"] > 0
    assert "FAILED" in result.stderr and "wrong bytes" in result.stderr


@for_each("option", [("--bytes-per-token", "6"), ("--threads", "1000")])
def test_options_out_of_range_are_refused(run: Run, trace: str, option: tuple[str, str]) -> None:
    result = run("replay", trace, *option)
    assert result.exit_code == 2 and "expected" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_replay_after_a_signal_removes_its_root(trace: str, tmp_path: Path, number: signal.Signals) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    child = subprocess.Popen(
        [*KVSTORE, "replay", trace, "--threads", "3", "--bytes-per-token", "4096"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=SOURCE,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        eventually(lambda: any(temporary.rglob("chunks/*/*")), "it writes chunks")
        child.send_signal(number)
        _, said = child.communicate(timeout=PATIENCE_S)
    finally:
        child.kill()
    assert child.returncode == 128 + number, said
    assert ("Aborted!" in said) == (number == signal.SIGINT), said
    assert list(temporary.iterdir()) == []
