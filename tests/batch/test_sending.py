"""Sending a batch: in order, so many at once, and never twice what has a result."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvstore.batch import upload as server
from kvstore.batch.file import RequestFile, read_batch
from kvstore.batch.upload import Results, Sent, Server, ServerAnswer, send
from kvstore.cli.app import app
from kvstore.errors import InvalidRequest, Unavailable
from tests.batch.answering import DROPS, Answering, Body, Says, answering, completes, talking
from tests.kit.cases import for_each
from tests.kit.patience import PATIENCE_S

COUNT = 12
DOCUMENT = 48
ORDER = [*range(0, COUNT, 2), *range(1, COUNT, 2)]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PAUSE_S", 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Requests about two documents in turns; the last token of a prompt is its number."""
    lines = [
        {"custom_id": f"r{at}", "method": "POST", "body": {"prompt": [at % 2] * DOCUMENT + [at]}} for at in range(COUNT)
    ]
    path = tmp_path / "batch.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.fixture
def batch(path: Path) -> RequestFile:
    return read_batch(path)


def sending(
    batch: RequestFile, at: Answering, results: Path, concurrency: int = 1, show: Callable[[str], None] = lambda _: None
) -> Sent:
    with Results(results) as opened:
        return send(batch, ORDER, Server(at.url, PATIENCE_S), opened, concurrency, lambda _: None, show)


def except_for(numbers: set[int], status: int, answer: Body) -> Says:
    """A server that answers so to these requests, and completes the others."""
    return lambda body: (status, answer) if body["prompt"][-1] in numbers else completes(body)


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def test_requests_are_sent_in_order_and_their_results_written(batch: RequestFile, tmp_path: Path) -> None:
    with answering() as at:
        sent = sending(batch, at, tmp_path / "results")
        assert at.order == ORDER
        assert set(at.paths) == {"/v1/completions"}
    assert sent == Sent(answered=COUNT, prompt_tokens=COUNT * (DOCUMENT + 1), cached_tokens=COUNT * DOCUMENT)
    assert ids(tmp_path / "results") == [f"r{at}" for at in ORDER]
    line = json.loads((tmp_path / "results").read_text().splitlines()[0])
    assert line["error"] is None and line["response"]["status_code"] == 200
    assert line["response"]["body"]["choices"] == [{"text": "x"}]


def test_no_more_than_the_limit_are_asked_at_once(batch: RequestFile, tmp_path: Path) -> None:
    together = threading.Barrier(3)

    def says(body: Body) -> tuple[int, Body]:
        together.wait(PATIENCE_S)
        return completes(body)

    with answering(says) as at:
        assert sending(batch, at, tmp_path / "results", concurrency=3).answered == COUNT
        assert at.at_once_most == 3
        assert sorted(at.order) == sorted(ORDER)


def test_what_has_a_result_is_not_sent_again(batch: RequestFile, tmp_path: Path) -> None:
    results = tmp_path / "results"
    with answering() as at:
        sending(batch, at, results)
        lines = results.read_text().splitlines(keepends=True)
        results.write_text("".join(lines[:5]) + lines[5][:20])
        at.asked.clear()
        sent = sending(batch, at, results)
        assert at.order == ORDER[5:], "a line that was cut off is no result"
        assert (sent.known, sent.answered) == (5, COUNT - 5)
    assert ids(results) == [f"r{at}" for at in ORDER]


def test_a_server_that_is_busy_is_asked_again(batch: RequestFile, tmp_path: Path) -> None:
    seen: set[int] = set()

    def says(body: Body) -> tuple[int, Body]:
        number = body["prompt"][-1]
        if number not in seen:
            seen.add(number)
            return (429, 503)[number % 2], {}
        return completes(body)

    with answering(says) as at:
        assert sending(batch, at, tmp_path / "results").answered == COUNT
        assert len(at.asked) == 2 * COUNT


@for_each("status", [400, 404, 500])
def test_request_that_the_server_refuses_is_counted(batch: RequestFile, tmp_path: Path, status: int) -> None:
    results, shown = tmp_path / "results", list[str]()
    with answering(except_for({3}, status, {"error": {"message": "too long"}})) as at:
        sent = sending(batch, at, results, show=shown.append)
        assert (sent.answered, sent.refused, sent.failed) == (COUNT - 1, int(status == 400), int(status != 400))
        assert shown == [f"request 'r3': status {status}: too long"]
        at.says = completes
        assert sending(batch, at, results).answered == int(status != 400), "a status of 400 is the result"


def test_request_without_an_answer_does_not_stop_the_others(batch: RequestFile, tmp_path: Path) -> None:
    shown = list[str]()
    with answering(except_for({3}, DROPS, {})) as at:
        sent = sending(batch, at, tmp_path / "results", show=shown.append)
        assert len(at.asked) == COUNT - 1 + server.TRIES_MAX
    assert (sent.answered, sent.failed) == (COUNT - 1, 1)
    assert len(shown) == 1 and shown[0].startswith("request 'r3': no answer: the server")


def test_requests_in_a_row_without_an_answer_end_the_run(batch: RequestFile, tmp_path: Path) -> None:
    dropped = set(ORDER[2:])
    with answering(except_for(dropped, DROPS, {})) as at, pytest.raises(Unavailable, match="does not answer"):
        sending(batch, at, tmp_path / "results")
    assert set(at.order) == {*ORDER[: 2 + server.FAILURES_MAX]}


@for_each("status", ["429 Busy", "503 Busy"])
def test_pause_of_a_server_is_made_within_its_limit(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    monkeypatch.setattr(server, "RETRY_AFTER_S_MAX", 0.1)
    raw = f"HTTP/1.1 {status}\r\nRetry-After: 86400\r\nContent-Length: 2\r\n\r\n{{}}"
    with talking(raw.encode()) as url:
        begun_s = time.monotonic()
        Server(url, PATIENCE_S).post("/", b"{}")
        assert time.monotonic() - begun_s >= 0.1 * (server.TRIES_MAX - 1)


def test_request_that_times_out_is_not_repeated(batch: RequestFile, tmp_path: Path) -> None:
    ended, shown = threading.Event(), list[str]()

    def silent(body: Body) -> tuple[int, Body]:
        assert body["prompt"][-1] != 3 or ended.wait(PATIENCE_S)
        return completes(body)

    with answering(silent) as at, Results(tmp_path / "results") as results:
        sent = send(batch, ORDER, Server(at.url, 2.0), results, 1, lambda _: None, shown.append)
        ended.set()
        assert (sent.answered, sent.failed, at.order.count(3)) == (COUNT - 1, 1, 1)
    assert "allow more by --timeout" in shown[0]


@for_each(
    "head, body",
    [
        ("200 OK\r\nContent-Length: 100", b'{"id": "cut'),
        ("200 OK", b'{"id": "cut'),
        ("200 OK\r\nContent-Length: 6", b"<html>"),
        ("200 OK\r\nContent-Length: 3", b"[1]"),
    ],
)
def test_what_is_no_whole_answer_is_no_result(batch: RequestFile, tmp_path: Path, head: str, body: bytes) -> None:
    with talking(f"HTTP/1.1 {head}\r\n\r\n".encode() + body) as url, Results(tmp_path / "results") as results:
        with pytest.raises(Unavailable, match=r"cut off|no JSON object"):
            send(batch, ORDER, Server(url, PATIENCE_S), results, 2, lambda _: None)
    assert ids(tmp_path / "results") == []


@for_each("status, said", [(401, "rejected the API key"), (403, "rejected the API key"), (302, "redirects")])
def test_a_server_that_refuses_everybody_ends_the_run_without_results(
    batch: RequestFile, tmp_path: Path, status: int, said: str
) -> None:
    with answering(lambda body: (status, {})) as at, pytest.raises(InvalidRequest, match=said):
        sending(batch, at, tmp_path / "results")
    assert ids(tmp_path / "results") == []


def test_answers_that_came_before_an_error_are_written(batch: RequestFile, tmp_path: Path) -> None:
    """The third request breaks; the answer to another one that is there by then is a result all the same."""
    with answering() as at, Results(tmp_path / "results") as results:
        asked = Server(at.url, PATIENCE_S)
        post, others, answered = asked.post, threading.Event(), list[int]()

        def breaks(path: str, body: bytes) -> ServerAnswer:
            number = json.loads(body)["prompt"][-1]
            if number == ORDER[2]:
                others.wait(PATIENCE_S)
                raise InvalidRequest("the key was revoked")
            answer = post(path, body)
            answered.append(number)
            if len(answered) == 3:
                others.set()
            return answer

        asked.post = breaks  # type: ignore[method-assign]
        with pytest.raises(InvalidRequest):
            send(batch, ORDER, asked, results, 4, lambda _: None)
        assert results.known >= {f"r{number}" for number in answered[:3]}


@for_each("content", ['{"precious": 1}', '{"custom_id": "a", "body": {}}\n{"custom_id": "b"', "x"])
def test_a_file_of_another_kind_stays_as_it_is(tmp_path: Path, content: str) -> None:
    (tmp_path / "other").write_text(content)
    with pytest.raises(InvalidRequest, match="is not a result of a batch"):
        Results(tmp_path / "other")
    assert (tmp_path / "other").read_text() == content


def plan(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments), "--memory-tokens", "100"], prog_name="kvstore")


def test_the_command_sends_and_says_what_was_cached(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with answering() as at:
        at_once = ("--server", f"{at.url}/v1", "--concurrency", "2")
        assert plan(path, *at_once, "--dry-run").exit_code == 0
        assert not at.asked
        shown = plan(path, *at_once)
        assert shown.exit_code == 0, shown.output
        assert re.search(r"cached tokens +576", shown.stdout)
        assert set(at.keys) == {"Bearer secret"} and set(at.paths) == {"/v1/completions"}
        again = plan(path, *at_once, "--json")
        assert json.loads(again.stdout)["sent"]["known"] == COUNT
        assert len(at.asked) == COUNT
    assert len(ids(Path(f"{path}.results.jsonl"))) == COUNT


def test_command_shows_refusals_and_exits_1(path: Path) -> None:
    with answering(except_for({3}, 400, {"message": "\x1b[31mno"})) as at:
        done = plan(path, "--server", at.url)
    assert done.exit_code == 1 and "kvstore plan: request 'r3': status 400: \\x1b[31mno" in done.stderr


def test_command_without_any_answer_exits_2(path: Path) -> None:
    with answering(lambda _: (DROPS, {})) as at:
        done = plan(path, "--server", at.url)
    assert done.exit_code == 2 and "does not answer" in done.stderr and len(done.stderr.splitlines()) == 1
