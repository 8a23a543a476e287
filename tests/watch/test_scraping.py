"""The server of metrics: a client of its port takes a bounded part of the process, and Prometheus is answered."""

from __future__ import annotations

import select
import socket
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from kvstore.core import http_server
from tests.kit.cases import for_each
from tests.kit.etcd import eventually
from tests.kit.patience import PATIENCE_S


def page(environ: Any, start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"up 1\n" * 200_000]


@pytest.fixture
def port() -> Iterator[int]:
    server = http_server.HttpServer(page, "127.0.0.1", 0)
    yield int(server.address.rpartition(":")[2])
    server.close()


def is_answered(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
            return bool(answer.read() == b"up 1\n" * 200_000)
    except OSError:
        return False  # let go for another: a scraper asks again


@for_each("sent", [b"", b"GET /metrics HTTP/1.0\r\nX: ", b"GET /metrics HTTP/1.0\r\n\r\n"])
def test_many_that_ask_nothing_or_take_no_answer_get_no_thread_each(port: int, sent: bytes) -> None:
    before = threading.active_count()
    with ExitStack() as undo:
        many = [
            undo.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)) for _ in range(100)
        ]
        for each in many:
            with suppress(OSError):  # let go already
                each.sendall(sent)
        eventually(lambda: is_answered(port))
        eventually(lambda: threading.active_count() <= before + http_server.CONNECTIONS_MAX)
        assert len(many) > 5 * http_server.CONNECTIONS_MAX
    eventually(lambda: threading.active_count() <= before)


def test_one_that_asks_nothing_is_let_go(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as silent:
        assert select.select([silent], [], [], PATIENCE_S)[0] and silent.recv(1) == b""
    assert is_answered(port) and capfd.readouterr().err == "", "neither is worth a line"
