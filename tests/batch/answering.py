"""An OpenAI-compatible server for tests: it counts what it is asked, and answers as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

Body = dict[str, Any]
Says = Callable[[Body], tuple[int, Body]]
DROPS = 0
"""Instead of a status: the server ends the connection without an answer."""


def completes(body: Body) -> tuple[int, Body]:
    """An answer whose prompt was cached but for one token."""
    count = len(body["prompt"])
    usage = {"prompt_tokens": count, "prompt_tokens_details": {"cached_tokens": count - 1}}
    return 200, {"choices": [{"text": "x"}], "usage": usage}


class Answering:
    """A server in threads of this process."""

    def __init__(self, says: Says) -> None:
        self.says = says
        self.asked: list[Body] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.at_once = self.at_once_most = 0
        self._lock = threading.Lock()
        answering = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = answering.answer(body, self.path, self.headers["Authorization"])
                if status == DROPS:
                    return
                raw = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def order(self) -> list[int]:
        """The last token of each prompt asked for, in order."""
        return [body["prompt"][-1] for body in self.asked]

    def answer(self, body: Body, path: str, key: str | None) -> tuple[int, Body]:
        with self._lock:
            self.asked.append(body)
            self.paths.append(path)
            self.keys.append(key)
            self.at_once += 1
            self.at_once_most = max(self.at_once, self.at_once_most)
        try:
            return self.says(body)
        finally:
            with self._lock:
                self.at_once -= 1

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def answering(says: Says = completes) -> Iterator[Answering]:
    """A server that is stopped at the end."""
    server = Answering(says)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def talking(raw: bytes) -> Iterator[str]:
    """A server that answers every request with these bytes, and ends the connection; its URL."""

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            length = 0
            while (line := self.rfile.readline()).strip():
                if line.lower().startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            self.rfile.read(length)
            self.wfile.write(raw)

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
