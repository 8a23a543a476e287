"""A small S3 endpoint for tests, which decides conditional deletes as AWS does, or as a test wants them.

Of the servers that can be installed, rclone and Ceph 16 ignore the condition, and moto decides it without a lock.
Only what the root asks of a bucket, as AWS answers it: PUT (``If-None-Match: *``, copies), GET (ranges), HEAD, DELETE
(``If-Match``), ListObjectsV2. It keeps objects in memory, decides under one lock, and looks at no signature.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE_MAX = 1000
MTIME_S = 1_700_000_000
REASONS = {
    404: "NoSuchKey",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    416: "InvalidRange",
    501: "NotImplemented",
}


@dataclass(frozen=True, slots=True)
class Object:
    """One version of an object."""

    content: bytes

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.content, usedforsecurity=False).hexdigest()}"'


@dataclass(slots=True)
class Server:
    """The objects of a server, by ``/bucket/key``, and how it differs from AWS."""

    creates: bool = True
    """True if ``If-None-Match`` counts."""
    deletes: bool = True
    """True if ``If-Match`` counts for DELETE."""
    gone_status: int = 404
    """The answer to a conditional DELETE of what is not there. AWS says 404; others 204, or 412 after RFC 9110."""
    broken_status: int | None = None
    """The answer to every conditional DELETE, if any."""
    before: Callable[[str, str], object] = lambda method, path: None
    """Called with each request before anything is looked at, outside the lock."""
    endpoint: str = ""
    objects: dict[str, Object] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def serve(server: Server) -> Iterator[Server]:
    """Serves on a port of loopback, which ``endpoint`` names."""

    class Answering(_Answering):
        store = server

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    listening.daemon_threads = True
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    server.endpoint = f"http://127.0.0.1:{listening.server_address[1]}"
    try:
        yield server
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


class _Answering(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    store: Server

    def log_message(self, format: str, *values: object) -> None:
        """Nothing is logged."""

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True  # the client left

    def do_GET(self) -> None:
        path, query = self._asked()
        if path.count("/") == 1:
            self._list(f"{path}/", query)
            return
        with self.store.lock:
            found = self.store.objects.get(path)
        if found is None:
            self._refuse(404)
            return
        content, more = found.content, {}
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            content = found.content[int(first) : int(last) + 1]
            if not content:
                self._refuse(416)
                return
            end = int(first) + len(content) - 1
            more = {"Content-Range": f"bytes {first}-{end}/{len(found.content)}"}
        self._answer(206 if more else 200, content, {**_about(found), **more})

    def do_HEAD(self) -> None:
        path, _ = self._asked()
        with self.store.lock:
            found = self.store.objects.get(path)
        if found is None:
            self._answer(404, b"")
            return
        self._answer(200, b"", {**_about(found), "Content-Length": str(len(found.content))})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, _ = self._asked()
        source = self.headers.get("x-amz-copy-source")
        with self.store.lock:
            if self.store.creates and self.headers.get("If-None-Match") == "*" and path in self.store.objects:
                self._refuse(412)
                return
            written = Object(content)
            if source is not None:
                copied = self.store.objects.get("/" + unquote(source).lstrip("/"))
                if copied is None:
                    self._refuse(404)
                    return
                written = copied
            self.store.objects[path] = written
        answer = f"<CopyObjectResult><ETag>{written.etag}</ETag></CopyObjectResult>" if source is not None else ""
        self._answer(200, answer.encode(), {"ETag": written.etag})

    def do_DELETE(self) -> None:
        path, _ = self._asked()
        wanted = self.headers.get("If-Match")
        with self.store.lock:
            found = self.store.objects.get(path)
            if wanted is not None and self.store.broken_status is not None:
                self._refuse(self.store.broken_status)
                return
            if wanted is not None and self.store.deletes:
                if found is None:
                    self._refuse(self.store.gone_status)
                    return
                if found.etag != wanted:
                    self._refuse(412)
                    return
            self.store.objects.pop(path, None)
        self._answer(204, b"")

    def _asked(self) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        path = unquote(parts.path).rstrip("/")
        self.store.before(self.command, path)
        self.store.requests.append((self.command, path))
        return path, parse_qs(parts.query)

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        prefix = bucket + query.get("prefix", [""])[0]
        after = query.get("continuation-token", [""])[0]
        with self.store.lock:
            under = {path: found for path, found in self.store.objects.items() if path.startswith(prefix)}
        folders = {prefix + path[len(prefix) :].split("/")[0] + "/" for path in under if "/" in path[len(prefix) :]}
        names = sorted({path for path in under if "/" not in path[len(prefix) :]} | folders)
        page = [name for name in names if name > after][:PAGE_MAX]
        cut = bool(page) and page[-1] != names[-1]
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if cut else ""
        body = "".join(_listed(name, name[len(bucket) :], under.get(name)) for name in page)
        body = f"<IsTruncated>{str(cut).lower()}</IsTruncated>{token}{body}"
        self._answer(200, f"<ListBucketResult>{body}</ListBucketResult>".encode())

    def _refuse(self, status: int) -> None:
        code = REASONS.get(status, "InternalError")
        # AWS also names the condition that failed; not every server does.
        body = f"<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>" if status != 204 else ""
        self._answer(status, body.encode())

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if status != 204:
            self.wfile.write(body)


def _about(found: Object) -> dict[str, str]:
    return {"ETag": found.etag, "Last-Modified": formatdate(MTIME_S, usegmt=True)}


def _listed(path: str, key: str, found: Object | None) -> str:
    if found is None:
        return f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>"
    stamp = "2023-11-14T22:13:20.000Z"
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>{stamp}</LastModified><ETag>{escape(found.etag)}</ETag>"
        f"<Size>{len(found.content)}</Size></Contents>"
    )
