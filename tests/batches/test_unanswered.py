"""Requests of a batch without an answer: why is told, and the others are done all the same."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvstore.batches import Results, Sent, Server, read_batch, send, sending
from kvstore.batches import sending as reasons
from kvstore.batches import sending as server
from kvstore.cli.app import app
from kvstore.errors import Unavailable
from tests.batches.answering import DROPS, Answering, Body, Says, answering, completes, talking
from tests.kit.cases import for_each
from tests.kit.patience import PATIENCE_S

COUNT = 12


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PAUSE_S", 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Requests whose prompt is their number."""
    path = tmp_path / "batch.jsonl"
    lines = (json.dumps({"custom_id": f"r{at}", "body": {"prompt": [at]}}) for at in range(COUNT))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture
def told() -> list[str]:
    """The lines that the user sees."""
    return []


def sends(path: Path, at: Answering, told: list[str], concurrency: int = 1) -> Sent:
    with Results(path.parent / "results") as results:
        asked = Server(at.url, PATIENCE_S)
        return send(read_batch(path), range(COUNT), asked, results, concurrency, lambda _: None, told.append)


def plan(path: Path, at: Answering) -> Result:
    arguments = ["plan", str(path), "--memory-tokens", "100", "--server", at.url]
    return CliRunner().invoke(app, arguments, prog_name="kvstore")


def but_for(numbers: set[int], status: int, answer: Body) -> Says:
    """A server that answers so to these requests, and completes the others."""
    return lambda body: (status, answer) if body["prompt"][0] in numbers else completes(body)


def test_one_request_that_gets_no_answer_does_not_stop_the_others(path: Path, told: list[str]) -> None:
    with answering(but_for({3}, DROPS, {})) as at:
        sent = sends(path, at, told)
        assert len(at.asked) == COUNT - 1 + server.TRIES_MAX
    assert (sent.answered, sent.failed) == (COUNT - 1, 1)
    assert told[0].startswith(f"request 'r3': no answer: the server {at.url} does not answer (RemoteDisconnected")
    assert told[1:] == ["1 request in all: no answer"]


def test_several_in_a_row_without_an_answer_end_the_run(path: Path, told: list[str]) -> None:
    with answering(but_for(set(range(2, COUNT)), DROPS, {})) as at, pytest.raises(Unavailable, match="does not answer"):
        sends(path, at, told)
    assert {body["prompt"][0] for body in at.asked} == set(range(2 + sending.UNREACHED_MAX))
    assert told == []


def test_a_server_that_answers_nothing_could_not_run(tmp_path: Path, told: list[str]) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text(json.dumps({"custom_id": "a", "body": {"prompt": [1]}}))
    with answering(lambda _: (DROPS, {})) as at:
        result = plan(path, at)
    assert result.exit_code == 2 and "does not answer" in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("status", [400, 404, 500])
def test_why_is_told_of_the_first_and_counted_for_all(path: Path, told: list[str], status: int) -> None:
    with answering(but_for(set(range(1, COUNT)), status, {"error": {"message": "too long"}})) as at:
        sent = sends(path, at, told)
    assert sent.refused + sent.failed == COUNT - 1
    first = [f"request 'r{number}': status {status}: too long" for number in range(1, 1 + reasons.TOLD_MAX)]
    assert told == [*first, f"{COUNT - 1} requests in all: status {status}"]


def test_the_command_shows_what_the_server_said(path: Path) -> None:
    with answering(but_for({3}, 400, {"message": "\x1b[31mno"})) as at:
        shown = plan(path, at)
    assert shown.exit_code == 1
    assert "kvstore plan: request 'r3': status 400: \\x1b[31mno" in shown.stderr
    assert "kvstore plan: 1 request in all: status 400" in shown.stderr


@for_each("status", ["429 Busy", "503 Busy"])
def test_the_pause_that_a_server_asks_for_is_made_within_its_limit(
    monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    monkeypatch.setattr(server, "RETRY_AFTER_S_MAX", 0.1)
    raw = f"HTTP/1.1 {status}\r\nRetry-After: 86400\r\nContent-Length: 2\r\n\r\n{{}}"
    with talking(raw.encode()) as url:
        begun_s = time.monotonic()
        Server(url, PATIENCE_S).post("/", b"{}")
        assert time.monotonic() - begun_s >= 0.1 * (server.TRIES_MAX - 1)
