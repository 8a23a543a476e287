"""Files that change at run time: access, certificates, tokens, etcd's certificate. Wrong ones change nothing."""

from __future__ import annotations

import itertools
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.client.pool import Bulk
from kvstore.errors import KVStoreError, Overloaded, PermissionDenied, Unauthenticated, Unavailable
from kvstore.meta.etcd import EtcdMetadata, EtcdTls
from tests.kit.cases import for_each
from tests.kit.certificates import Authority
from tests.kit.etcd import tls_etcd
from tests.kit.patience import slowness
from tests.kit.secured import SOON, Secured, secured
from tests.kit.stores import SMALL, kv_of, same
from tests.kit.workers import WAIT_S, eventually

pytestmark = pytest.mark.slow

TOKENS = np.arange(3 * SMALL.chunk_tokens)
KV = kv_of(SMALL, TOKENS)
READER, WRITER = {"acme": "read"}, {"acme": "write"}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Secured]:
    with secured(tmp_path, {"cert:engine": WRITER, "cert:reader": READER, "engine": WRITER}) as running:
        yield running


def error_of(call: Callable[[], object]) -> type[KVStoreError] | None:
    try:
        call()
    except KVStoreError as error:
        return type(error)
    return None


def test_new_rules_are_in_force_and_wrong_ones_never(served: Secured) -> None:
    with kvstore.connect(served.address, tls=served.authority.client("engine"), limits=SOON) as store:
        cache = store.namespace("m", SMALL, tenant="acme")
        tokens = itertools.count(0, 10_000)

        def put() -> object:
            return cache.put(TOKENS + next(tokens), KV, required=True)

        assert error_of(put) is None
        served.set_access(identities={"cert:engine": READER})
        eventually(lambda: error_of(put) is PermissionDenied, "the role was taken away")
        served.set_access(identities={"cert:engine": "write"})
        eventually(lambda: error_of(put) and served.counters["access_reload_failures"], "the file was refused")
        assert error_of(put) is PermissionDenied
        served.set_access(identities={"cert:engine": WRITER})
        eventually(lambda: error_of(put) is None, "the role is back")
        served.set_access(quotas={"acme": {"requests_per_s": 0.01}})
        eventually(lambda: error_of(put) is Overloaded, "a quota")
    assert served.counters["refused_requests_quota"] == served.counters["quota_refused"] > 0
    outcomes = [line["outcome"] for line in served.audited() if line["event"] == "reload"]
    assert outcomes[:3] == ["ok", "refused", "ok"]


def test_pins_over_their_quota_are_refused(served: Secured) -> None:
    served.set_access(quotas={"acme": {"pins_max": 2}})
    with kvstore.connect(served.address, tls=served.authority.client("engine"), limits=SOON) as store:
        cache = store.namespace("m", SMALL, tenant="acme")
        cache.put(TOKENS, KV)

        def refusal() -> str:
            try:
                cache.pin(TOKENS, 60).release()
            except Overloaded as error:
                return str(error)
            return ""

        pins = [cache.pin(TOKENS, 60) for _ in range(2)]
        eventually(lambda: "may have 2" in refusal(), "the first quota")
        pins[0].release()
        cache.pin(TOKENS, 60)
        served.set_access(quotas={"acme": {"pinned_tokens_max": 3 * len(TOKENS) - 1}})
        eventually(lambda: "tokens pinned" in refusal(), "the second quota")


@for_each("bulk", ["grpc", "tcp", "shared"])
def test_bytes_count_on_every_transport(tmp_path: Path, bulk: str) -> None:
    quotas = {"in": {"bytes_in_per_s": 1}, "out": {"bytes_out_per_s": 1}}
    identities = {"cert:engine": {"in": "write", "out": "write", "free": "write"}}
    with secured(tmp_path, identities, quotas=quotas) as served:
        tls = served.authority.client("engine")
        with kvstore.connect(served.address, tls=tls, limits=SOON, bulk=Bulk.of(bulk)) as store:
            for tenant, put_again, get_again in (("in", Overloaded, 0), ("out", None, 0), ("free", None, len(TOKENS))):
                cache = store.namespace("m", SMALL, tenant=tenant)
                cache.put(TOKENS, KV)
                if tenant == "out":
                    assert cache.get(TOKENS)[0] == len(TOKENS)
                if tenant != "out":
                    assert error_of(lambda at=cache: at.put(TOKENS + 10_000, KV, required=True)) is put_again, tenant  # type: ignore[misc]
                assert cache.get(TOKENS)[0] == get_again, f"{tenant}: a tenant in debt has misses"
        assert served.counters["refused_bytes_quota"] > 0


def shown_by(served: Secured, tls: kvstore.ClientTls) -> tuple[int, int]:
    """The serial number of the certificate on each of the two ports; the bulk one first."""
    listener = served.worker.service.bulk
    assert listener is not None
    context = ssl.create_default_context(cafile=tls.ca_file)
    context.load_cert_chain(str(tls.cert_file), str(tls.key_file))
    numbers = []
    for port in (listener.tcp_port, int(served.address.rsplit(":", 1)[1])):
        with socket.create_connection(("127.0.0.1", port), WAIT_S) as sock:
            with context.wrap_socket(sock, server_hostname="127.0.0.1") as wrapped:
                found = wrapped.getpeercert()
                assert found is not None
                numbers.append(int(str(found["serialNumber"]), 16))
    return numbers[0], numbers[1]


def test_renewed_certificate_is_used_without_a_restart(served: Secured) -> None:
    tls = served.authority.client("engine")
    first = shown_by(served, tls)
    gauges = served.worker.service.gauges()
    assert 0 < gauges["certificate_expires_seconds"] <= 86_400
    served.authority.server()  # written over the one before
    eventually(lambda: all(new != old for new, old in zip(shown_by(served, tls), first, strict=True)), "renewed")
    second = shown_by(served, tls)
    served.server.cert.write_text("no certificate")
    time.sleep(1.1)
    assert shown_by(served, tls) == second


def test_client_renews_its_certificate_and_token(served: Secured) -> None:
    tls = served.authority.client("reader")
    file = served.token_file(served.issuer.token("engine", ttl_s=1, ago_s=100))
    with kvstore.connect(served.address, tls=tls, token_file=file, limits=SOON, bulk="tcp") as store:
        with pytest.raises(Unauthenticated):
            store.namespace("m", SMALL, tenant="acme")
        served.token_file(served.issuer.token("engine"))
        eventually(lambda: error_of(lambda: store.namespace("m", SMALL, tenant="acme")) is None, "a new token")
        assert store.namespace("m", SMALL, tenant="acme").put(TOKENS, KV).chunks_written == 3
        served.token_file("")  # as it is for a moment while a shell writes it
        time.sleep(1.1)
        assert store.namespace("m", SMALL, tenant="acme").match(TOKENS) == len(TOKENS)
    with kvstore.connect(served.address, tls=tls, limits=SOON, bulk="tcp") as store:
        cache = store.namespace("m", SMALL, tenant="acme")
        assert error_of(lambda: cache.put(TOKENS + 10_000, KV)) is PermissionDenied
        engine = served.authority.issue("engine")
        shutil.copy(engine.key, str(tls.key_file))
        shutil.copy(engine.cert, str(tls.cert_file))
        eventually(lambda: error_of(lambda: cache.put(TOKENS + 10_000, KV)) is None, "a new certificate")


def test_node_renews_its_certificate_for_etcd(tmp_path: Path, tmp_root: Path) -> None:
    good, other = Authority(tmp_path), Authority(tmp_path / "other")
    mine = folder(tmp_path / "mine")
    ca, cert, key = mine / "ca.pem", mine / "tls.pem", mine / "tls.key"

    def install(authority: Authority) -> None:
        pair = authority.issue("client")
        for source, target in ((authority.ca, ca), (pair.cert, cert), (pair.key, key)):
            shutil.copy(source, target)
        key.chmod(0o600)

    install(other)
    tls = EtcdTls(ca, cert, key)
    with tls_etcd(tmp_path, good) as endpoint:
        meta = EtcdMetadata(f"https://{endpoint}", tls=tls, timeout_s=slowness())
        try:
            assert error_of(lambda: meta.get("a")) is Unavailable
            with pytest.raises(Unavailable, match="check the CA"):
                meta.get("a", 10 * slowness())
            install(good)
            eventually(lambda: error_of(lambda: meta.get("a")) is None, "the certificate is used")
            cert.write_text("no certificate")
            time.sleep(1.1)
            assert error_of(lambda: meta.get("a")) is None
        finally:
            meta.close()
        install(good)
        with kvstore.open(f"file://{tmp_root}", f"https://{endpoint}", etcd_tls=tls) as store:
            cache = store.namespace("m", SMALL)
            cache.put(TOKENS, KV)
            assert same(cache.get(TOKENS)[1], KV)
            with cache.pin(TOKENS, 60):
                assert cache.refcount(TOKENS) == 1


def folder(path: Path) -> Path:
    path.mkdir()
    return path
