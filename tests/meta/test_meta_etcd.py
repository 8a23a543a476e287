"""etcd treated badly: killed, frozen, unreachable, protected, cut off in the middle of an answer."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.core.clock import RandomIds, SystemClock
from kvstore.errors import InvalidRequest, KVStoreError, PermissionDenied, Unavailable
from kvstore.meta.embedded_etcd import EmbeddedEtcd
from kvstore.meta.etcd import EtcdEndpoints, EtcdMetadata, EtcdTls, EtcdUser
from kvstore.meta.keys import Keys
from kvstore.meta.session import Session, SessionManager
from kvstore.meta.store import Absent, Event, LeaseId, Put, WatchLost
from kvstore.testing.metadata import take
from tests.kit.cases import for_each
from tests.kit.etcd import PATIENCE_S, Proxy, compact, enable_auth, eventually, frozen, running_etcd
from tests.kit.patience import returns

pytestmark = pytest.mark.slow

DEADLINE_S = 0.3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedEtcd]:
    """An etcd that the test may break."""
    with running_etcd(tmp_path) as started:
        yield started


@pytest.fixture
def client() -> Iterator[Callable[..., EtcdMetadata]]:
    opened: list[EtcdMetadata] = []

    def make(endpoints: str, timeout_s: float = PATIENCE_S, **more: object) -> EtcdMetadata:
        opened.append(EtcdMetadata(endpoints, timeout_s=timeout_s, **more))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for meta in opened:
        meta.close()


@pytest.fixture
def mute() -> Iterator[str]:
    """An endpoint that takes connections and never says a word, as a frozen member does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@for_each(
    "text, targets, tls",
    [
        ("h:1", ("h:1",), None),
        ("10.0.0.5:2379, h2:2379", ("10.0.0.5:2379", "h2:2379"), None),
        ("http://h:1/,http://h:2", ("h:1", "h:2"), False),
        (["https://h:1", "HTTPS://[::1]:2"], ("h:1", "[::1]:2"), True),
        ("h:1,h:1", ("h:1",), None),
    ],
)
def test_endpoints_are_parsed_in_every_form(text: str, targets: tuple[str, ...], tls: bool | None) -> None:
    assert EtcdEndpoints.parse(text) == EtcdEndpoints(targets, tls)


def calls(meta: EtcdMetadata) -> list[Callable[[], object]]:
    """One call of each kind."""
    return [
        lambda: meta.get("a"),
        lambda: meta.list("a"),
        lambda: meta.txn((Absent("a"),), (Put("a", b""),)),
        lambda: meta.put("a", b""),
        lambda: meta.delete("a"),
        lambda: meta.grant(5),
        lambda: meta.keep_alive(LeaseId(7)),
        lambda: meta.revoke(LeaseId(7)),
    ]


def test_calls_to_a_frozen_etcd_end_in_time(server: EmbeddedEtcd, client: Callable[..., EtcdMetadata]) -> None:
    meta = client(server.endpoints, DEADLINE_S)
    meta.put("kept", b"1", timeout_s=PATIENCE_S)
    with frozen(server.pid):
        for call in calls(meta):
            with pytest.raises(Unavailable):
                returns(call)
        with pytest.raises(Unavailable, match="outcome is unknown"):
            meta.txn((), (Put("late", b"1"),))
    # Requests sent to a frozen server may still take effect, so only the untouched key is compared.
    assert meta.get("kept", PATIENCE_S) is not None


def test_frozen_first_endpoint_leaves_time_for_the_second(
    server: EmbeddedEtcd, client: Callable[..., EtcdMetadata]
) -> None:
    proxy = Proxy(server.endpoints)
    try:
        meta = client(f"{proxy.endpoint},{server.endpoints}")
        meta.put("a", b"1")
        proxy.swallow.set()
        assert meta.get("a", 4.0) is not None, "half of the time is left for the second member"
        assert meta.txn((Absent("b"),), (Put("b", b"1"),)).succeeded, "the first is not asked again"
    finally:
        proxy.close()


def test_bad_tls_settings_are_invalid(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read the TLS authority"):
        EtcdMetadata("h:1", tls=EtcdTls(tmp_path / "missing.pem"))
    with pytest.raises(InvalidRequest, match="go together"):
        EtcdTls(cert_file="a")
    with pytest.raises(InvalidRequest, match="https://"):
        EtcdMetadata("http://h:1", tls=EtcdTls())


def test_user_and_password(server: EmbeddedEtcd, client: Callable[..., EtcdMetadata]) -> None:
    early = client(server.endpoints, user=EtcdUser("ann", "secret"))
    early.put("/kv/a", b"1")  # configured before authentication is switched on
    enable_auth(server.endpoints, "ann", "secret", "/kv/")
    meta = client(server.endpoints, user=EtcdUser("ann", "secret"))
    for one in (meta, early):
        assert one.get("/kv/a") is not None
        assert one.txn((Absent("/kv/b"),), (Put("/kv/b", b""),)).succeeded or one is early
        assert one.keep_alive(one.grant(60))
    assert take(meta.watch("/kv/", 2), 1)[0].key == "/kv/a"
    with pytest.raises(PermissionDenied, match="role covers"):
        meta.get("/other")
    with pytest.raises(PermissionDenied):
        meta.txn((), (Put("/other", b""),))
    with pytest.raises(WatchLost, match="role covers"):
        meta.watch("/other", 1).next(PATIENCE_S)
    with pytest.raises(PermissionDenied, match="check user and password"):
        client(server.endpoints, user=EtcdUser("ann", "wrong")).get("/kv/a")
    with pytest.raises(PermissionDenied, match="give user and password"):
        client(server.endpoints).get("/kv/a")
    with pytest.raises(PermissionDenied):
        SessionManager(client(server.endpoints), Keys(bytes(16))).start(wait_s=PATIENCE_S)
    assert "secret" not in repr(EtcdUser("ann", "secret"))

    # A restarted server has forgotten the token: it is fetched again, for calls and for watches.
    watch = meta.watch("/kv/c", 2)
    server.stop()
    server.start()
    meta.put("/kv/c", b"")
    assert take(watch, 1)[0].key == "/kv/c"


def test_granted_lease_with_a_lost_reply_is_found_again(
    server: EmbeddedEtcd, client: Callable[..., EtcdMetadata]
) -> None:
    ids = RecordingIds()
    proxy = Proxy(server.endpoints)
    try:
        meta, direct = client(proxy.endpoint, ids=ids), client(server.endpoints)
        meta.get("a")
        proxy.swallow.set()
        granted: list[int] = []
        thread = threading.Thread(target=lambda: granted.append(meta.grant(60)))
        thread.start()
        eventually(lambda: bool(ids.made) and direct.keep_alive(LeaseId(int.from_bytes(ids.made[0][:8], "big") >> 1)))
        proxy.swallow.clear()
        proxy.cut()
        thread.join(PATIENCE_S)
        assert granted == [int.from_bytes(ids.made[0][:8], "big") >> 1] and len(ids.made) == 1
    finally:
        proxy.close()


def test_transaction_with_a_lost_reply_is_unknown(server: EmbeddedEtcd, client: Callable[..., EtcdMetadata]) -> None:
    proxy = Proxy(server.endpoints)
    try:
        meta, direct = client(proxy.endpoint), client(server.endpoints)
        session = Session.open(meta, Keys(bytes(16)), clock=SystemClock(), ids=RandomIds(), ttl_s=60)

        def lose(call: Callable[[], object], key: str) -> list[object]:
            outcome: list[object] = []

            def run() -> None:
                try:
                    outcome.append(call())
                except KVStoreError as error:
                    outcome.append(error)

            meta.get("a")  # connected, so that only answers are missing from here on
            proxy.swallow.set()
            thread = threading.Thread(target=run)
            thread.start()
            eventually(lambda: direct.get(key) is not None)
            proxy.swallow.clear()
            proxy.cut()
            thread.join(PATIENCE_S)
            return outcome

        (plain,) = lose(lambda: meta.txn((Absent("plain"),), (Put("plain", b""),)), "plain")
        assert isinstance(plain, Unavailable) and "outcome is unknown" in str(plain)
        (settled,) = lose(lambda: session.txn((), (Put("settled", b""),), timeout_s=PATIENCE_S), "settled")
        assert not isinstance(settled, Exception), settled
        assert session.txn((), (Put("next", b""),)).succeeded
    finally:
        proxy.close()


def test_watch_continues_over_a_restart_without_a_gap(
    server: EmbeddedEtcd, client: Callable[..., EtcdMetadata]
) -> None:
    meta = client(server.endpoints)
    watch = meta.watch("w/", 1)
    seen: list[Event] = []
    for round_ in range(3):
        for number in range(500):  # more than a watch holds back
            meta.put("w/a", b"%d" % (500 * round_ + number))
        if round_ == 1:
            seen += take(watch, 5)
        if round_ < 2:
            os.kill(server.pid, signal.SIGKILL)
            eventually(lambda: not server.running)
            server.start()
    seen += take(watch, 1500 - len(seen))
    assert [event.kv.value for event in seen if event.kv] == [b"%d" % number for number in range(1500)]


def test_watch_cut_off_during_a_compaction_is_lost(server: EmbeddedEtcd, client: Callable[..., EtcdMetadata]) -> None:
    proxy = Proxy(server.endpoints)
    meta, direct = client(proxy.endpoint), client(server.endpoints)
    watch = meta.watch("w", 1)
    direct.put("w", b"1")
    assert len(take(watch, 1)) == 1
    proxy.close()
    direct.put("w", b"2")
    compact(server.endpoints, direct.put("w", b"3"))
    again = Proxy(server.endpoints, proxy.port)
    try:
        with pytest.raises(WatchLost, match="compacted"):
            watch.next(PATIENCE_S)
    finally:
        again.close()


def test_watch_that_cannot_reconnect_is_lost(server: EmbeddedEtcd, client: Callable[..., EtcdMetadata]) -> None:
    meta = client(server.endpoints, watch_reconnect_s=0.5)
    meta.put("w", b"1")
    watch = meta.watch("w", 1)
    take(watch, 1)
    server.stop()
    with pytest.raises(WatchLost, match="no connection for"):
        watch.next(PATIENCE_S)
    with pytest.raises(WatchLost):
        watch.next(0)


def test_closing_ends_running_calls_and_threads(mute: str, client: Callable[..., EtcdMetadata]) -> None:
    meta = client(mute)
    watch = meta.watch("w", 1)
    errors: list[Exception] = []

    def call() -> None:
        try:
            meta.get("a")
        except Unavailable as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    eventually(lambda: meta.operations_count == 2)
    meta.close()
    caller.join(PATIENCE_S)
    assert len(errors) == 1 and not caller.is_alive()
    with pytest.raises(WatchLost, match="closed"):
        watch.next(0)
    eventually(lambda: not any(thread.name.startswith("etcd-watch") for thread in threading.enumerate()))


class RecordingIds:
    """Random ids, recorded."""

    def __init__(self) -> None:
        self.made: list[bytes] = []

    def fresh(self) -> bytes:
        self.made.append(os.urandom(16))
        return self.made[-1]
