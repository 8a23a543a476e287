"""The log of servers: events as text for people, and as JSON with every value under its name."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator

import pytest

from kvstore.cli import options
from kvstore.core import tracing


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """Yields the output on standard error; what ``configure`` changes is restored afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("kvstore")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield lambda: capsys.readouterr().err
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def test_an_event_is_one_json_object_with_its_values_by_name(said: Callable[[], str]) -> None:
    options.configure("info", "json")
    log = logging.getLogger("kvstore.worker.server")
    with tracing.request("req-7"):
        log.warning("drain.cut calls=%d share=%.1f%% why=%s", 3, 12.5, "two\nlines")
    log.info("session.lost %s", "ab12")
    log.debug("not.shown")
    first, second = map(json.loads, said().splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "warning",
        "logger": "kvstore.worker.server",
        "event": "drain.cut",
        "request": "req-7",
        "message": "drain.cut calls=3 share=12.5% why=two\nlines",
        "calls": 3,
        "share": 12.5,
        "why": "two\nlines",
    }
    assert second["message"] == "session.lost ab12" and "request" not in second


def test_a_traceback_is_part_of_its_line(said: Callable[[], str]) -> None:
    options.configure("info", "json")
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("kvstore").exception("call.failed method=%s", "Get")
    (line,) = map(json.loads, said().splitlines())
    assert line["method"] == "Get" and line["error"].endswith("ValueError: no")
