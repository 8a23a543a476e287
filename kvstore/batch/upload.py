"""Sends a batch to a server in a plan's order, several requests at a time, and writes each result as it arrives."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvstore.batch.file import RequestFile
from kvstore.core.validate import DEPTH_MAX, parse_json
from kvstore.errors import InvalidRequest, Unavailable

# An OpenAI-compatible server: one request at a time over a connection of its own, repeated where it was refused.


TRIES_MAX = 5
PAUSE_S = 0.5
"""Pause before the second try; it doubles each time."""
RETRY_AFTER_S_MAX = 60.0
"""Limit on the pause that a server asks for (Retry-After)."""
CONNECT_S_MAX = 5.0
ANSWER_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """The server's answer to one request."""

    status: int
    body: bytes
    retry_after_s: float = 0.0
    """Pause that the server asks for, within its limit."""

    @property
    def is_refused(self) -> bool:
        """True if the server asks to be asked again later."""
        return self.status in (408, 429) or self.status >= 500


class Server:
    """A server by its URL, such as ``http://host:8000`` (with or without ``/v1``). Thread-safe."""

    def __init__(self, url: str, timeout_s: float, key: str | None = None) -> None:
        """``key`` is sent as bearer token. Raises InvalidRequest for a URL that is none."""
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname, parts.port
        except ValueError as cause:
            raise InvalidRequest(f"server {url!r}: {cause}") from cause
        path = parts.path.rstrip("/").removesuffix("/v1")
        if parts.scheme not in ("http", "https") or not self._host or parts.query or not path.isascii():
            raise InvalidRequest(f"server {url!r}: expected http://HOST:PORT, or https://")
        self.url = url
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._path = path
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._closed = threading.Event()
        self._open: set[http.client.HTTPConnection] = set()

    def post(self, path: str, body: bytes) -> ServerAnswer:
        """Posts a request, several times if the server refuses it; returns the last answer.

        Raises Unavailable if no whole answer came of it, InvalidRequest if the server refuses the key or redirects.
        """
        failure: Exception = ConnectionError("closed")
        pause_s = 0.0
        for attempt in range(TRIES_MAX):
            if self._closed.wait(pause_s):
                break
            pause_s = PAUSE_S * 2**attempt
            try:
                answer = self._once(path, body)
            except TimeoutError:
                failure = TimeoutError(f"no whole answer within {self._timeout_s:g} s: allow more by --timeout")
                break  # another try may wait as long
            except (OSError, http.client.HTTPException) as error:
                failure = error
                continue
            if not answer.is_refused or attempt == TRIES_MAX - 1:
                return answer
            pause_s = max(pause_s, answer.retry_after_s)
        raise Unavailable(f"the server {self.url} does not answer ({type(failure).__name__}: {failure})") from failure

    def close(self) -> None:
        """Cuts all connections, so that requests in progress end soon. Idempotent."""
        self._closed.set()
        for connection in list(self._open):
            sock = connection.sock
            if sock is not None:
                with suppress(OSError):  # it has ended by itself
                    sock.shutdown(socket.SHUT_RDWR)

    def _once(self, path: str, body: bytes) -> ServerAnswer:
        assert self._host is not None
        ends_s = time.monotonic() + self._timeout_s
        connection = self._kind(self._host, self._port, timeout=min(CONNECT_S_MAX, self._timeout_s))
        self._open.add(connection)
        try:
            self._connect(connection)
            connection.request("POST", self._path + path, body, self._headers)
            response = connection.getresponse()
            pieces, size = list[bytes](), 0
            while piece := response.read1(1 << 16):
                pieces.append(piece)
                size += len(piece)
                if size > ANSWER_BYTES_MAX:
                    raise http.client.HTTPException(f"an answer of over {ANSWER_BYTES_MAX} bytes")
                if time.monotonic() > ends_s:
                    raise TimeoutError(f"not done within {self._timeout_s:g} s")
            if response.length:
                raise http.client.HTTPException(f"the answer was cut off, {response.length} bytes before its end")
            return self._checked(response, b"".join(pieces))
        finally:
            self._open.discard(connection)
            connection.close()

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        """Connects, and gives the connection the limit of an answer. Raises OSError."""
        try:
            connection.connect()
        except TimeoutError as cause:
            raise ConnectionError(f"no connection within {connection.timeout:g} s") from cause
        if self._closed.is_set():
            raise ConnectionError("closed")  # while there was no socket yet that close could cut
        connection.sock.settimeout(self._timeout_s)

    def _checked(self, response: http.client.HTTPResponse, body: bytes) -> ServerAnswer:
        """Returns an answer that may be a result. Raises InvalidRequest, HTTPException."""
        if response.status in (401, 403, 407):
            raise InvalidRequest(f"the server {self.url} rejected the API key (status {response.status})")
        if 300 <= response.status < 400:
            raise InvalidRequest(
                f"the server {self.url} redirects (status {response.status}): give the URL that it names, "
                f"{response.headers.get('Location')!r}"
            )
        if response.status < 300 and not _is_object(body):
            raise http.client.HTTPException(f"the answer is no JSON object: {body[:80]!r}")
        return ServerAnswer(response.status, body, _retry_after_s(response))


def _retry_after_s(response: http.client.HTTPResponse) -> float:
    """The pause that the server asks for in seconds; 0 if it names none, or a date."""
    text = (response.headers.get("Retry-After") or "").strip() if response.status in (429, 503) else ""
    return min(float(text), RETRY_AFTER_S_MAX) if text.isascii() and text.isdecimal() else 0.0


def _is_object(body: bytes) -> bool:
    try:
        return isinstance(parse_json(body), dict)
    except ValueError:
        return False


# The results of a batch, one JSON line each, as OpenAI's batch output has them. What is written is not asked again.
#
# A line is appended once its answer is there. A program that is killed in between leaves at most one part of a line,
# at the end, which the next one cuts off. Nothing else is ever cut off.


LINE_BYTES_MAX = 6 * ANSWER_BYTES_MAX + (16 << 10)
"""The line of any answer fits: a byte that is no text becomes an escape of six, and a custom_id has 1024 characters."""
_BEGINNING = b'{"id": "result-'
_LINE_DEPTH = 2
"""Levels of a line above its answer."""


class Results:
    """A file of results, open for one program at a time. Close it, or use it as a context."""

    def __init__(self, path: Path) -> None:
        """Opens the file and reads whose results it has.

        Raises InvalidRequest for a file of another kind, a device or a pipe, or a file that cannot be written.
        """
        self.path = path
        self.known: set[str] = set()
        """The custom_id of each request whose result is in the file."""
        self.refused: set[str] = set()
        """Those of them that the server called wrong, when this was opened."""
        self._whole_bytes = 0
        if path.exists() and not path.is_file():
            raise InvalidRequest(f"the results {str(path)!r} are not a regular file: give another --results FILE")
        try:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by close
        except OSError as cause:
            raise InvalidRequest(f"cannot write the results {str(path)!r}: {cause.strerror or cause}") from cause
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def add(self, custom_id: str, answer: ServerAnswer) -> dict[str, Any]:
        """Writes a result, and returns the answer's body as JSON, empty if it is none. Raises Unavailable."""
        try:
            body = parse_json(answer.body, depth_max=DEPTH_MAX - _LINE_DEPTH)
            line = self._line(custom_id, answer.status, body)
        except ValueError:
            body = {"text": answer.body.decode(errors="replace")}
            line = self._line(custom_id, answer.status, body)
        self._append(line)
        self.known.add(custom_id)
        return body if isinstance(body, dict) else {}

    def close(self) -> None:
        """Closes the file; results are on the disk."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, custom_id: str, status: int, body: Any) -> bytes:
        response = {"status_code": status, "request_id": "", "body": body}
        line = {"id": f"result-{len(self.known)}", "custom_id": custom_id, "response": response, "error": None}
        return json.dumps(line).encode() + b"\n"

    def _append(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError as cause:
            with suppress(OSError):
                self._file.truncate(self._whole_bytes)  # or the next line would go on in the middle of this one
            raise Unavailable(f"cannot write the results {str(self.path)!r}: {cause.strerror or cause}") from cause
        self._whole_bytes += len(line)

    def _lock(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            raise InvalidRequest(f"the results {str(self.path)!r} are being written by another program") from cause

    def _read(self) -> None:
        number, is_ended = 0, True
        with open(self.path, "rb") as file:
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                where = f"{str(self.path)!r}, line {number}"
                if len(line) > LINE_BYTES_MAX:
                    raise InvalidRequest(f"{where} has over {LINE_BYTES_MAX} bytes: give another --results FILE")
                try:
                    record = parse_json(line)
                    custom_id, response = str(record["custom_id"]), record["response"]
                except (ValueError, KeyError, TypeError) as cause:
                    if not line.endswith(b"\n") and line[: len(_BEGINNING)] == _BEGINNING[: len(line)]:
                        break  # the end of the file, cut off when its writer was killed
                    raise InvalidRequest(f"{where} is not a result of a batch: give another --results FILE") from cause
                self.known.add(custom_id)
                if _is_refusal(response):
                    self.refused.add(custom_id)
                self._whole_bytes += len(line)
                is_ended = line.endswith(b"\n")
        self._file.truncate(self._whole_bytes)
        if not is_ended:
            self._append(b"\n")  # a whole result by another program: the next one begins a line of its own


def _is_refusal(response: Any) -> bool:
    status = response.get("status_code") if isinstance(response, dict) else None
    return isinstance(status, int) and status >= 400


# A whole batch. Why requests have no answer is shown for the first few.


SHOWN_MAX = 10
"""Requests without an answer that are shown."""
MESSAGE_CHARS_MAX = 200
NAME_CHARS_MAX = 80
FAILURES_MAX = 5
"""Requests in a row that get no answer: the server is gone, and the run ends."""

Progress = Callable[[int], None]
Show = Callable[[str], None]
"""Shows one line to the user. The server's text is in it, which may have any character."""


def message_of(body: bytes) -> str:
    """The message in an answer that is an error, on one line, cut where it is long; empty if there is none.

    OpenAI has it in ``error.message``, vLLM in ``message``, FastAPI in ``detail``.
    """
    try:
        found = parse_json(body)
        for name in ("error", "message", "detail"):
            if isinstance(found, dict) and name in found:
                found = found[name]
        text = found if isinstance(found, str) else json.dumps(found)
    except ValueError:
        text = body[: 4 * MESSAGE_CHARS_MAX].decode(errors="replace")
    return _cut(" ".join(text.split()), MESSAGE_CHARS_MAX)


def _cut(text: str, chars_max: int) -> str:
    return text if len(text) <= chars_max else f"{text[:chars_max]}..."


@dataclass(slots=True)
class Sent:
    """The outcome of sending a batch. Tokens are those that the server reports for the requests of this time."""

    answered: int = 0
    """Requests with a result that is an answer."""
    known: int = 0
    """Requests whose result was there before."""
    refused: int = 0
    """Requests that the server calls wrong (status 4xx); that is their result."""
    refused_before: int = 0
    """Those of ``known`` that the server called wrong."""
    failed: int = 0
    """Requests that the server did not do, however often it was asked; they have no result."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were in the server's prefix cache, if it says so (prompt_tokens_details)."""


def send(
    batch: RequestFile,
    order: Sequence[int],
    server: Server,
    results: Results,
    concurrency: int,
    progress: Progress,
    show: Show = lambda _: None,
) -> Sent:
    """Sends the requests that have no result yet. ``show`` is called with why some of them have no answer.

    A request that was in progress when a program was killed has no result, and is sent again. Raises InvalidRequest as
    ``Server.post`` does, and Unavailable if no request, or none of several in a row, was answered.
    """
    sending = _Sending(results, progress, show)
    sent, flying = sending.sent, sending.flying
    threads = ThreadPoolExecutor(concurrency, thread_name_prefix="kvstore-batch")
    try:
        for custom_id, path, body in _requests(batch, order):
            if custom_id in results.known:
                sent.known += 1
                sent.refused_before += custom_id in results.refused
                progress(1)
                continue
            flying[threads.submit(server.post, path, body)] = custom_id
            if len(flying) == concurrency:
                sending.land()
        while flying:
            sending.land()
    finally:
        if flying:
            server.close()  # an error, or Ctrl-C: the rest is not waited for
        threads.shutdown(cancel_futures=True)
        for each in [each for each in flying if not each.cancelled() and each.exception() is None]:
            sending.write(flying.pop(each), each.result())
    if sending.failure is not None and not sending.is_answered:
        raise sending.failure
    return sent


@dataclass(slots=True)
class _Sending:
    """The requests that are on their way, and the outcome of the others."""

    results: Results
    progress: Progress
    show: Show
    sent: Sent = field(default_factory=Sent)
    flying: dict[Future[ServerAnswer], str] = field(default_factory=dict)
    failure: Unavailable | None = None
    """The last failure."""
    failures: int = 0
    """Requests without an answer since the last answer."""
    is_answered: bool = False
    """True once an answer came."""
    shown: int = 0

    def land(self) -> None:
        """Waits for an answer, and writes all that are there. Raises if the others need not be waited for."""
        done = wait(self.flying, return_when=FIRST_COMPLETED).done
        for each in sorted(done, key=lambda each: each.exception() is not None):  # answers first: they are results
            custom_id = self.flying.pop(each)
            failed = each.exception()
            if failed is None:
                self.write(custom_id, each.result())
            elif isinstance(failed, Unavailable):
                self._fail(custom_id, failed)
            else:
                raise failed
            self.progress(1)

    def write(self, custom_id: str, answer: ServerAnswer) -> None:
        """Writes an answer, and counts it."""
        self.is_answered, self.failures = True, 0
        if answer.is_refused or answer.status == 404:  # a model that is not found may be served next time
            self.sent.failed += 1
            self._explain(custom_id, f"status {answer.status}: {message_of(answer.body)}")
            return
        body = self.results.add(custom_id, answer)
        if answer.status >= 400:
            self.sent.refused += 1
            self._explain(custom_id, f"status {answer.status}: {message_of(answer.body)}")
            return
        self.sent.answered += 1
        usage = body.get("usage")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            self.sent.prompt_tokens += _whole(usage.get("prompt_tokens"))
            self.sent.cached_tokens += _whole(details.get("cached_tokens")) if isinstance(details, dict) else 0

    def _fail(self, custom_id: str, failure: Unavailable) -> None:
        self.sent.failed += 1
        self.failure = failure
        self.failures += 1
        if self.failures >= FAILURES_MAX:
            raise failure
        if self.is_answered:
            self._explain(custom_id, f"no answer: {failure}")

    def _explain(self, custom_id: str, why: str) -> None:
        self.shown += 1
        if self.shown <= SHOWN_MAX:
            self.show(f"request {_cut(custom_id, NAME_CHARS_MAX)!r}: {why}")


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _requests(batch: RequestFile, order: Sequence[int]) -> Iterator[tuple[str, str, bytes]]:
    """Yields custom_id, path and body of each request."""
    for record in batch.requests(order):
        body = record["body"]
        path = record.get("url") or ("/v1/chat/completions" if "messages" in body else "/v1/completions")
        yield record["custom_id"], path, json.dumps(body).encode()
