"""Clients with a false identity or bad behaviour: refused or bounded, while others are served."""

from __future__ import annotations

import datetime
import hashlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import kvstore
from kvstore import ClientTls
from kvstore.client.failover import Endpoint
from kvstore.client.limits import ClientLimits
from kvstore.client.pool import Bulk, Credentials
from kvstore.errors import PermissionDenied, Unauthenticated, Unavailable
from kvstore.worker.limits import WorkerLimits
from tests.kit.certificates import Authority
from tests.kit.patience import eventually, stretched
from tests.kit.secured import SOON, Secured, bearer, secured
from tests.kit.stores import SMALL, kv_of, same
from tests.kit.workers import WAIT_S

pytestmark = pytest.mark.slow

TOKENS = np.arange(3 * SMALL.chunk_tokens)
KV = kv_of(SMALL, TOKENS)
IDENTITIES = {"cert:engine": {"acme": "write"}, "engine": {"acme": "write"}, "other": {"globex": "admin"}}
LIMITS = stretched(WorkerLimits(idle_s=1.0, hello_s=1.0, calls_max=8, spare_calls_max=4), "idle_s", "hello_s")
STATS = "/kvstore.v1.KVStore/Stats"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured(tmp_path_factory.mktemp("hostile"), IDENTITIES, limits=LIMITS) as running:
        yield running


@pytest.fixture(scope="module")
def engine(served: Secured) -> ClientTls:
    return served.authority.client("engine")


def works(served: Secured, tls: ClientTls, token_file: Path | None = None, bulk: str = "auto") -> None:
    """A client of good will puts and gets, within seconds."""
    with kvstore.connect(served.address, tls=tls, token_file=token_file, bulk=Bulk.of(bulk), limits=SOON) as store:
        cache = store.namespace("m", SMALL, tenant="acme")
        cache.put(TOKENS, KV)
        count, array = cache.get(TOKENS)
        assert count == len(TOKENS) and same(array, KV)


def test_memory_is_not_shared_with_one_tenant(served: Secured, engine: ClientTls) -> None:
    endpoint = Endpoint(served.address, Bulk.SHARED, ClientLimits(), Credentials(engine))
    try:
        with endpoint.bulk.link(WAIT_S) as link:
            assert link is not None
            assert (link.hands_files, link.memory) == (False, None)
            link.channel.alive = False
    finally:
        endpoint.close()


def certificates(served: Secured, tmp_path: Path) -> dict[str, ClientTls | None]:
    """Clients whose handshake must fail."""
    good, other = served.authority.client("engine"), Authority(tmp_path / "other").client("engine")
    old = served.authority.issue("old", lives=-datetime.timedelta(hours=1))
    return {
        "no certificate": ClientTls(good.ca_file),
        "a certificate of another authority": ClientTls(good.ca_file, other.cert_file, other.key_file),
        "a worker of another authority": ClientTls(other.ca_file, good.cert_file, good.key_file),
        "a certificate that has expired": ClientTls(good.ca_file, str(old.cert), str(old.key)),
        "another server's name": ClientTls(good.ca_file, good.cert_file, good.key_file, "another.example"),
        "plaintext on the TLS port": None,
    }


def test_wrong_handshakes_are_refused(served: Secured, tmp_path: Path) -> None:
    for name, tls in certificates(served, tmp_path).items():
        calls = dict(served.worker.service.calls.ended())
        with kvstore.connect(served.address, tls=tls, limits=SOON) as store, pytest.raises(Unavailable):
            store.namespace("m", SMALL, tenant="acme")
        assert dict(served.worker.service.calls.ended()) == calls, name
    for bulk in ("grpc", "tcp", "shared"):
        works(served, served.authority.client("engine"), bulk=bulk)


def raises_denied(call: Callable[[], object]) -> bool:
    try:
        call()
    except PermissionDenied:
        return True
    return False


def is_refused(served: Secured, tls: ClientTls, token_file: Path) -> bool:
    with kvstore.connect(served.address, tls=tls, token_file=token_file, limits=SOON) as store:
        return raises_denied(lambda: store.namespace("m", SMALL, tenant="acme"))


def test_stolen_and_old_tokens_are_refused(served: Secured, engine: ClientTls) -> None:
    issuer, thumbprint = (
        served.issuer,
        hashlib.sha256(ssl.PEM_cert_to_DER_cert(Path(str(engine.cert_file)).read_text())),
    )
    thief = served.authority.client("thief")
    bound = issuer.token("engine", "bound", bound=thumbprint.digest())
    works(served, engine, served.token_file(bound))  # with its certificate it is good
    revoked = served.token_file(issuer.token("engine", "stolen"), "stolen")
    works(served, thief, revoked)  # before anybody knows
    served.revoke("stolen")
    eventually(lambda: is_refused(served, thief, revoked), "the list of revoked tokens is read again")
    refused = {
        "expired": (Unauthenticated, issuer.token("engine", ttl_s=1, ago_s=100)),
        "replayed without its certificate": (Unauthenticated, bound),
        "revoked": (Unauthenticated, revoked.read_text().strip()),
        "of another tenant": (PermissionDenied, issuer.token("other")),
        "of nobody": (PermissionDenied, issuer.token("nobody")),
    }
    for name, (kind, token) in refused.items():
        denied = served.denied
        with kvstore.connect(served.address, tls=thief, token_file=served.token_file(token), limits=SOON) as store:
            with pytest.raises(PermissionDenied) as raised:
                store.namespace("m", SMALL, tenant="acme")
        assert type(raised.value) is kind, name
        assert token not in str(raised.value), name
        assert served.denied == denied + 1, name
    said = (served.folder / "audit.log").read_text() if served.audit.flush(WAIT_S) else ""
    assert not any(token in said for _, token in refused.values())


def test_open_bulk_connection_ends_with_its_token(served: Secured) -> None:
    tls, file = served.authority.client("thief"), served.token_file(served.issuer.token("engine", "short"), "short")
    with kvstore.connect(served.address, tls=tls, token_file=file, bulk="tcp", limits=SOON) as store:
        cache = store.namespace("m", SMALL, tenant="acme")
        cache.put(TOKENS, KV)
        served.revoke("short", "stolen")
        eventually(lambda: raises_denied(lambda: cache.put(TOKENS + 5000, KV)), "the list is read again")


def test_grant_is_bound_to_its_certificate(served: Secured, engine: ClientTls) -> None:
    mine = Endpoint(served.address, Bulk.TCP, ClientLimits(), Credentials(engine))
    theirs = Endpoint(served.address, Bulk.TCP, ClientLimits(), Credentials(served.authority.client("thief")))
    try:
        granted = mine.stub("OpenBulk")(b"", timeout=WAIT_S)
        theirs.bulk._ask = lambda request, timeout_s: granted
        with theirs.bulk.link(5.0) as stolen, mine.bulk.link(5.0) as own:
            assert stolen is None and own is not None
        assert served.worker.service.counters()["bulk_refused"] == 1
    finally:
        mine.close()
        theirs.close()


def test_garbage_on_the_bulk_port_is_cut_off(served: Secured, engine: ClientTls) -> None:
    listener = served.worker.service.bulk
    assert listener is not None
    refused = served.counters["bulk_refused"]
    for said in (b"", b"KV\1\0" + bytes(100), b"\x16\x03\x01" + bytes(300)):
        with socket.create_connection(("127.0.0.1", listener.tcp_port), WAIT_S) as sock:
            sock.sendall(said)
            sock.settimeout(WAIT_S)
            try:
                while sock.recv(4096):
                    pass
            except ConnectionResetError:
                pass
    assert served.counters["bulk_refused"] == refused + 3
    context = ssl.create_default_context(cafile=str(engine.ca_file))  # TLS, but no certificate of its own
    answer = b""
    with socket.create_connection(("127.0.0.1", listener.tcp_port), WAIT_S) as sock, suppress(OSError):
        with context.wrap_socket(sock, server_hostname="127.0.0.1") as wrapped:
            answer = wrapped.recv(1)  # with TLS 1.3 the server's refusal comes after the handshake
    assert not answer
    works(served, engine, bulk="tcp")


def test_too_large_headers_are_refused(served: Secured, engine: ClientTls) -> None:
    with served.channel(engine) as channel:
        stub: Any = channel.unary_unary(STATS)
        stub(b"", timeout=WAIT_S)
        for size in (64 << 10, 1 << 20):
            with pytest.raises(grpc.RpcError) as refused:
                stub(b"", timeout=WAIT_S, metadata=(("x", "y" * size),))
            assert refused.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
        token = "t" * 6000  # fits, and is no token
        with pytest.raises(grpc.RpcError) as refused:
            stub(b"", timeout=WAIT_S, metadata=bearer(token))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    works(served, engine)


def trickle(address: str, stop: threading.Event, sockets: ExitStack) -> None:
    """A TLS handshake of one byte a second that never ends."""
    host, port = address.rsplit(":", 1)
    sock = sockets.enter_context(socket.create_connection((host, int(port)), WAIT_S))

    def send() -> None:
        hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)
        try:
            for at in range(len(hello)):
                sock.send(hello[at : at + 1])
                if stop.wait(0.2):
                    return
        except OSError:
            pass

    threading.Thread(target=send, daemon=True).start()


def test_trickling_handshakes_block_no_client(served: Secured, engine: ClientTls) -> None:
    stop, sockets = threading.Event(), ExitStack()
    listener = served.worker.service.bulk
    assert listener is not None
    with sockets:
        for _ in range(20):
            trickle(served.address, stop, sockets)
            trickle(f"127.0.0.1:{listener.tcp_port}", stop, sockets)
        for bulk in ("grpc", "tcp"):
            works(served, engine, bulk=bulk)
        stop.set()


def test_unauthenticated_callers_may_check_health_alone(tmp_path: Path) -> None:
    limits = WorkerLimits(calls_max=4, spare_calls_max=4)  # 20 threads
    with secured(tmp_path, IDENTITIES, mutual=False, limits=limits) as served:
        anybody = served.authority.client()
        file = served.token_file(served.issuer.token("engine"))
        with served.channel(anybody) as channel:
            check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            stats: Any = channel.unary_unary(STATS)
            assert check(b"", timeout=WAIT_S) == b"\x08\x01"
            watch: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
            for denied in (stats, lambda raw, timeout: next(watch(raw, timeout=timeout))):
                with pytest.raises(grpc.RpcError) as refused:
                    denied(b"", timeout=WAIT_S)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            works(served, anybody, file)
            assert next(watch(b"", timeout=WAIT_S, metadata=bearer(file.read_text().strip()))) == b"\x08\x01"
            reflection: Any = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
            with pytest.raises(grpc.RpcError) as refused:
                list(reflection(iter([b"\x3a\x00"]), timeout=WAIT_S))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            allowed = reflection(iter([b"\x3a\x00"]), timeout=WAIT_S, metadata=bearer(served.issuer.token("engine")))
            assert b"kvstore.v1.KVStore" in b"".join(allowed)
