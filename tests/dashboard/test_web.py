"""The dashboard over real HTTP: what it refuses, and its safety headers."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvstore.cli.dashboard import PageAccess
from kvstore.core.http_server import HttpServer
from kvstore.dashboard.server import SAFETY, DashboardAuth, application
from kvstore.security.authentication import issue, new_key
from tests.kit.boards import Shown, shown
from tests.kit.cases import for_each
from tests.kit.certificates import Authority
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import TINY

VIEWS = ("overview", "history", "capacity", "namespaces", "pins", "workers", "prefixes", "damage")


@pytest.fixture(scope="module")
def board() -> Iterator[Shown]:
    with shown() as found:
        found.store.namespace("<script>\ud7ff", TINY)
        yield found


@contextmanager
def served(board: Shown, door: DashboardAuth, page: PageAccess | None = None) -> Iterator[int]:
    serving = HttpServer(application(board.board, door), "127.0.0.1", 0, page.tls() if page else None)
    try:
        yield int(serving.address.rpartition(":")[2])
    finally:
        serving.close()


@pytest.fixture(scope="module")
def port(board: Shown) -> Iterator[int]:
    with served(board, DashboardAuth(None, is_local=True)) as found:
        yield found


def get(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


@for_each("view", VIEWS)
def test_each_view_has_a_document(port: int, view: str) -> None:
    status, headers, content = get(port, f"/api/{view}")
    assert status == 200 and headers["content-type"] == "application/json"
    assert content.isascii() and isinstance(json.loads(content), dict)


@for_each("path", ["/", "/style.css", "/main.js", "/api/overview", "/api/nothing", "/health"])
def test_every_answer_tells_the_browser_to_trust_nothing_else(port: int, path: str) -> None:
    _, headers, _ = get(port, path)
    assert {name: headers[name] for name in SAFETY} == SAFETY
    assert "unsafe" not in headers["content-security-policy"]


@for_each(
    "path, status",
    [
        ("/../kvstore/errors.py", 404),
        ("/%2e%2e/%2e%2e/etc/passwd", 404),
        ("/static/main.js", 404),
        ("/__init__.py", 404),
        ("/api/prefixes?at=zz", 400),
        ("/api/prefixes?order=worst", 400),
        ("/api/history?after=nan", 400),
        (f"/api/overview?{'x' * 2_000}", 400),
    ],
)
def test_what_is_not_there_or_makes_no_sense_is_refused(port: int, path: str, status: int) -> None:
    assert get(port, path)[0] == status


@for_each("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_it_only_reads(port: int, method: str) -> None:
    assert get(port, "/api/overview", method)[0] == 405


@for_each("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.7:8080", ""])
def test_another_name_that_leads_here_is_refused(port: int, host: str) -> None:
    assert get(port, "/api/overview", Host=host)[0] == 403


def test_only_a_token_that_may_read_every_tenant_sees_anything(board: Shown, tmp_path: Path) -> None:
    private, public = new_key()
    (tmp_path / "key.pub").write_bytes(public)
    access = tmp_path / "access.json"
    identities = {"operator": {"*": "read"}, "acme": {"acme": "admin"}}
    access.write_text(json.dumps({"identities": identities, "token_keys": ["key.pub"]}))
    os.chmod(access, 0o600)

    def token(identity: str, *, at_s: float = time.time()) -> str:
        return f"Bearer {issue(private, identity, identity, at_s, 60)}"

    with served(board, DashboardAuth(str(access), is_local=False)) as port:
        assert get(port, "/api/overview")[0] == 401
        assert get(port, "/api/overview", Authorization="Bearer nonsense")[0] == 401
        assert get(port, "/api/overview", Authorization=token("operator", at_s=time.time() - 3_600))[0] == 401
        assert get(port, "/api/overview", Authorization=token("acme"))[0] == 403
        assert get(port, "/api/overview", Authorization=token("nobody"))[0] == 403
        assert get(port, "/api/overview", Authorization=token("operator"), Host="dash.example")[0] == 200
        for path in ("/", "/main.js", "/health"):
            assert get(port, path)[0] == 200, "what everybody has may be seen by everybody"


def test_a_renewed_certificate_is_used_for_the_next_connection(board: Shown, tmp_path: Path) -> None:
    pairs = [Authority(tmp_path / name).server() for name in ("first", "second")]
    cert, key = tmp_path / "page.crt", tmp_path / "page.key"

    def use(number: int) -> None:
        for source, target in ((pairs[number].cert, cert), (pairs[number].key, key)):
            fresh = target.with_suffix(".new")
            fresh.write_bytes(source.read_bytes())
            os.chmod(fresh, 0o600)
            fresh.rename(target)

    def presented(port: int) -> str:
        return ssl.get_server_certificate(("127.0.0.1", port), timeout=PATIENCE_S)

    use(0)
    with served(board, DashboardAuth(None, is_local=False), PageAccess(str(cert), str(key))) as port:
        before = presented(port)
        use(1)
        deadline_s = time.monotonic() + PATIENCE_S
        while presented(port) == before:
            assert time.monotonic() < deadline_s
            time.sleep(0.2)
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with suppress(ConnectionError):
                assert b"200" not in plain.recv(100), "plain HTTP is not answered"
