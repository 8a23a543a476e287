"""An OpenAI-compatible server: one request at a time over a connection of its own, repeated where it was refused."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.parsing import parse_json

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
