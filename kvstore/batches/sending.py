"""A batch sent to a server in a plan's order, so many requests at once, each result written as it comes."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvstore.batches.file import Batch
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.text import DEPTH_MAX, parse_json

# An OpenAI-compatible server: one request at a time over a connection of its own, repeated where it was refused.


TRIES_MAX = 5
PAUSE_S = 0.5
"""Pause before the second try; it doubles each time."""
RETRY_AFTER_S_MAX = 60.0
"""Limit on the pause that a server asks for (Retry-After)."""
CONNECT_S_MAX = 5.0
ANSWER_BYTES_MAX = 64 << 20


class Unreached(Unavailable):
    """This request got no answer, however often it was asked. Another one may: go on with the others."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The server's answer to one request."""

    status: int
    body: bytes
    retry_after_s: float = 0.0
    """Pause that the server asks for, within its limit."""

    @property
    def is_refused(self) -> bool:
        """True if the server asks to be asked again later."""
        return self.status in (408, 429) or self.status >= 500

    @property
    def is_result(self) -> bool:
        """True if asking again would change nothing. A model that is not found may be served next time."""
        return not self.is_refused and self.status != 404


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

    def post(self, path: str, body: bytes) -> Answer:
        """Posts a request, several times if the server refuses it; returns the last answer.

        Raises Unreached if no connection, or no whole answer, came of it; Unavailable if the server was silent for the
        whole time limit, which is not asked again, or if this was closed; InvalidRequest if it lets nobody in by this
        key, or is elsewhere.
        """
        error: Exception | None = None
        answer: Answer | None = None
        pause_s = 0.0
        for attempt in range(TRIES_MAX):
            if self._closed.wait(pause_s):
                break
            pause_s = PAUSE_S * 2**attempt
            try:
                answer, error = self._once(path, body), None
            except TimeoutError:
                error = TimeoutError(f"no whole answer within {self._timeout_s:g} s: allow more by --timeout")
                break  # another try may wait as long
            except (OSError, http.client.HTTPException) as failed:
                error = failed
                continue
            if not answer.is_refused:
                return answer
            pause_s = max(pause_s, answer.retry_after_s)
        if answer is not None and error is None:
            return answer
        kind = Unavailable if self._closed.is_set() or isinstance(error, TimeoutError) else Unreached
        why = f"{type(error).__name__}: {error}" if error is not None else "closed"
        raise kind(f"the server {self.url} does not answer ({why})") from error

    def close(self) -> None:
        """Cuts all connections, so that requests in progress end soon. Idempotent."""
        self._closed.set()
        for connection in list(self._open):
            sock = connection.sock
            if sock is not None:
                with suppress(OSError):  # it ended meanwhile
                    sock.shutdown(socket.SHUT_RDWR)

    def _once(self, path: str, body: bytes) -> Answer:
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

    def _checked(self, response: http.client.HTTPResponse, body: bytes) -> Answer:
        """Returns an answer that may be a result. Raises InvalidRequest, HTTPException."""
        if response.status in (401, 403, 407):
            raise InvalidRequest(f"the server {self.url} lets nobody in by this key (status {response.status})")
        if 300 <= response.status < 400:
            raise InvalidRequest(
                f"the server {self.url} is elsewhere (status {response.status}): give the URL that it names, "
                f"{response.headers.get('Location')!r}"
            )
        if response.status < 300 and not _is_object(body):
            raise http.client.HTTPException(f"what came is no JSON object: {body[:80]!r}")
        return Answer(response.status, body, _retry_after_s(response))


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


GROWTH_MAX = 6
"""Bytes of a line for one byte of an answer at most: a byte that is no text becomes an escape, ``\\ufffd``."""
FRAME_BYTES_MAX = 16 << 10
"""Bytes of a line beside its answer at most. A custom_id has 1024 characters, and 12 bytes for each at most."""
LINE_BYTES_MAX = GROWTH_MAX * ANSWER_BYTES_MAX + FRAME_BYTES_MAX
"""The line of any answer that ``Server`` returns fits."""
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

    def add(self, custom_id: str, answer: Answer) -> dict[str, Any]:
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


# Why requests of a batch have no answer: the first few of each kind are told at once, and all are counted.


TOLD_MAX = 3
"""Requests of one kind that are told."""
MESSAGE_CHARS_MAX = 200
NAME_CHARS_MAX = 80

Tell = Callable[[str], None]
"""Shows one line to the user. The server's text is in it, which may have any character."""


class Reasons:
    """Counts requests without an answer by kind, such as ``status 400``."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._counts: Counter[str] = Counter()

    def add(self, custom_id: str, kind: str, message: str) -> None:
        """Counts a request. ``message`` is the server's, or that of an error."""
        self._counts[kind] += 1
        if self._counts[kind] <= TOLD_MAX:
            self._tell(f"request {_cut(custom_id, NAME_CHARS_MAX)!r}: {kind}{message and ': '}{message}")

    def tell_counts(self) -> None:
        """Tells how many requests each kind has."""
        for kind, count in sorted(self._counts.items()):
            self._tell(f"{count:,} request{'s' * (count > 1)} in all: {kind}")


def message_of(body: bytes) -> str:
    """The message in an answer that is an error, on one line, cut where it is long; empty if there is none.

    OpenAI has it in ``error.message``, vLLM in ``message``, FastAPI in ``detail``.
    """
    try:
        said = parse_json(body)
        for name in ("error", "message", "detail"):
            if isinstance(said, dict) and name in said:
                said = said[name]
        text = said if isinstance(said, str) else json.dumps(said)
    except ValueError:
        text = body[: 4 * MESSAGE_CHARS_MAX].decode(errors="replace")
    return _cut(" ".join(text.split()), MESSAGE_CHARS_MAX)


def _cut(text: str, chars_max: int) -> str:
    return text if len(text) <= chars_max else f"{text[:chars_max]}..."


Progress = Callable[[int], None]
UNREACHED_MAX = 5
"""Different requests in a row that get no answer: the server is gone, and the run ends."""


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
    batch: Batch,
    order: Sequence[int],
    server: Server,
    results: Results,
    concurrency: int,
    progress: Progress,
    tell: Tell = lambda _: None,
) -> Sent:
    """Sends the requests that have no result yet. ``tell`` is called with why some of them have no answer.

    A request that was in progress when a program was killed has no result, and is sent again. Raises InvalidRequest as
    ``Server.post`` does, and Unavailable if the server is silent, or several requests in a row were not answered.
    """
    reasons = Reasons(tell)
    sending = _Sending(results, progress, reasons)
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
        sending.end()
    finally:
        if flying:
            server.close()  # an error, or Ctrl-C: nobody waits for the rest
        threads.shutdown(cancel_futures=True)
        for each in [each for each in flying if not each.cancelled() and each.exception() is None]:
            sending.write(flying.pop(each), each.result())
        reasons.tell_counts()
    return sent


@dataclass(slots=True)
class _Sending:
    """The requests that are on their way, and what came of the others."""

    results: Results
    progress: Progress
    reasons: Reasons
    sent: Sent = field(default_factory=Sent)
    flying: dict[Future[Answer], str] = field(default_factory=dict)
    unreached: list[tuple[str, Unreached]] = field(default_factory=list)
    """Requests without an answer since the last answer: of the server, or of these requests?"""
    is_answered: bool = False
    """True once an answer came."""

    def land(self) -> None:
        """Waits for an answer, and writes all that are there. Raises if the others need not be waited for."""
        done = wait(self.flying, return_when=FIRST_COMPLETED).done
        error: BaseException | None = None
        for each in sorted(done, key=lambda each: each.exception() is None):  # answers last: then the server is there
            custom_id = self.flying.pop(each)
            failed = each.exception()
            if failed is None:
                self.write(custom_id, each.result())
                self.progress(1)
            elif isinstance(failed, Unreached):
                self.unreached.append((custom_id, failed))
            else:
                error = error or failed
        if error is not None:
            raise error
        if len(self.unreached) >= UNREACHED_MAX:
            raise self.unreached[-1][1]

    def write(self, custom_id: str, answer: Answer) -> None:
        """Writes an answer, and counts it."""
        self.is_answered = True
        self._give_up()
        if not answer.is_result:
            self.sent.failed += 1
            self._explain(custom_id, answer)
            return
        body = self.results.add(custom_id, answer)
        if answer.status >= 400:
            self.sent.refused += 1
            self._explain(custom_id, answer)
            return
        self.sent.answered += 1
        usage = body.get("usage")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            self.sent.prompt_tokens += _whole(usage.get("prompt_tokens"))
            self.sent.cached_tokens += _whole(details.get("cached_tokens")) if isinstance(details, dict) else 0

    def end(self) -> None:
        """Counts the last requests that got no answer. Raises Unreached if no request got one."""
        if self.unreached and not self.is_answered:
            raise self.unreached[-1][1]
        self._give_up()

    def _give_up(self) -> None:
        """Counts requests that got no answer while others get one."""
        for custom_id, failed in self.unreached:
            self.sent.failed += 1
            self.reasons.add(custom_id, "no answer", str(failed))
            self.progress(1)
        self.unreached.clear()

    def _explain(self, custom_id: str, answer: Answer) -> None:
        self.reasons.add(custom_id, f"status {answer.status}", message_of(answer.body))


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _requests(batch: Batch, order: Sequence[int]) -> Iterator[tuple[str, str, bytes]]:
    """Yields custom_id, path and body of each request."""
    for record in batch.requests(order):
        body = record["body"]
        path = record.get("url") or ("/v1/chat/completions" if "messages" in body else "/v1/completions")
        yield record["custom_id"], path, json.dumps(body).encode()
