"""What people read: the ``repr`` of what a store gives, and errors that say what to check."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import pytest

import kvstore
from kvstore.client.failover import Caller, CallFailed
from kvstore.errors import Unavailable
from kvstore.meta.memory import MemoryMetadata
from kvstore.meta.namespaces import Namespaces
from kvstore.meta.store import KeyValue
from kvstore.transport.status import Failure, failure
from tests.kit.cases import for_each
from tests.kit.stores import SMALL, TINY, kv_of
from tests.kit.workers import connected, serving

TOKENS = range(8 * TINY.chunk_tokens)
KEYS = [bytes([number]) * 16 for number in range(3)]
SHAPE = "2x2x4x1x4 int8"


def said_of(store: kvstore.Store, place: str) -> None:
    """Checks the ``repr`` of everything that a store gives, before and after it is closed."""
    cache = store.namespace("m", TINY, tenant="alice")
    cache.put(TOKENS, kv_of(TINY, TOKENS))
    cache.blocks.put(KEYS[:2], [b"abc"] * 2)
    hold, blocks, pin = cache.hold(TOKENS), cache.blocks.hold(KEYS), cache.pin(TOKENS, ttl=60)
    about = f"'m' of tenant 'alice', {SHAPE}, {place}"
    assert repr(store) == f"<kvstore.Store {place}>"
    assert repr(cache) == f"<kvstore.Cache {about}>"
    assert repr(cache.blocks) == f"<kvstore.BlockCache {about}>"
    assert repr(hold) == f"<kvstore.Hold 32 tokens, <kvstore.Cache {about}>>"
    assert repr(blocks) == f"<kvstore.BlockHold 2 of 3 blocks, <kvstore.BlockCache {about}>>"
    assert repr(pin) == f"<kvstore.Pin 32 tokens of 'm', {pin.id}, {place}>"
    escaped = cache.pin(TOKENS, ttl=60, owner="two\nlines\x1b[31m")
    assert repr(escaped).startswith(r"<kvstore.Pin 32 tokens of 'm', two\nlines\x1b[31m") and "\n" in escaped.id
    assert repr(cache.pin([], ttl=60)) == f"<kvstore.Pin of nothing, {place}>"
    hold.release()
    assert repr(hold) == f"<kvstore.Hold 32 tokens, released, <kvstore.Cache {about}>>"
    store.close()
    assert repr(store) == f"<kvstore.Store {place}, closed>"
    assert repr(cache) == f"<kvstore.Cache {about}, closed>"
    assert repr(hold).endswith(", closed>>") and repr(pin).endswith(", closed>")
    blocks.release()


def test_an_embedded_store_says_where_it_is(tmp_root: Path) -> None:
    said_of(kvstore.open(tmp_root), f"root file://{tmp_root}")


def test_a_connected_store_says_where_it_is() -> None:
    with serving() as served:
        said_of(connected(served), f"workers {served.address}")


@contextmanager
def dialled(what: str, folder: Path) -> Iterator[str]:
    """An address at which there is no worker."""
    with closing(socket.socket()) as plain:
        plain.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{plain.getsockname()[1]}"
        if what == "silent":
            plain.listen()
        yield f"unix:{folder}/none" if what == "unix" else address


@for_each(
    "what, said",
    [
        ("refused", "nothing listens there; check that the worker runs"),
        ("silent", "what listens there does not speak; check the port"),
        ("unix", "there is no such socket; check that the worker runs"),
    ],
)
def test_a_worker_that_cannot_be_reached_gives_advice(what: str, said: str, tmp_path: Path) -> None:
    with dialled(what, tmp_path) as address, kvstore.connect(address) as store:
        for call in (lambda: store.namespace("m", TINY), store.stats, store.pins):
            with pytest.raises(Unavailable, match=said) as failed:
                call()
            message = str(failed.value)
            assert message.count(address) == 1
            assert not any(word in message for word in ("UNKNOWN", "UNAVAILABLE", "all addresses", "errno"))


RAW = re.compile(r"[A-Z]+_[A-Z]+|UNAVAILABLE|CANCELLED|UNIMPLEMENTED|all addresses|StatusCode|recvmsg|Method not found")
"""Words of gRPC that help nobody."""
GRPC_SAYS = [
    (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"),
    (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:5: Failed to"),
    (grpc.StatusCode.UNAVAILABLE, "recvmsg:Connection reset by peer"),
    (grpc.StatusCode.UNAVAILABLE, ""),
    (grpc.StatusCode.CANCELLED, "Locally cancelled by application!"),
    (grpc.StatusCode.UNIMPLEMENTED, "Method not found!"),
    (grpc.StatusCode.UNKNOWN, ""),
    (grpc.StatusCode.INTERNAL, ""),
]


@for_each("code, text", GRPC_SAYS)
def test_no_error_of_a_worker_has_the_words_of_grpc(code: grpc.StatusCode, text: str) -> None:
    said = str(failure(code, text, (), "node7:7070", 4.96).error)
    assert "node7:7070" in said and not RAW.search(said), said
    assert any(word in said for word in ("retry", "check", "see its log")), said
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        assert "did not answer within 5 s" in said


class Frozen(MemoryMetadata):
    """An etcd that does not answer in the time that it is given."""

    waited_s: float | None = None

    def get(self, key: str, timeout_s: float | None = None) -> KeyValue | None:
        Frozen.waited_s = timeout_s
        raise Unavailable("etcd: get: DEADLINE_EXCEEDED: check that etcd runs")


def test_a_new_namespace_while_etcd_is_frozen_names_etcd() -> None:
    with serving() as served, connected(served, limits=kvstore.ClientLimits(pin_s=3.0)) as store:
        member = served.member
        member._namespaces = Namespaces(Frozen(), member.keys)
        with pytest.raises(Unavailable, match="namespace 'm' is new to this node, which needs etcd: etcd: get"):
            store.namespace("m", SMALL)
        # The worker hears of it before its client gives up, or the client could not name etcd.
        assert Frozen.waited_s is not None and Frozen.waited_s < 3.0


def test_what_one_worker_says_tells_more_than_the_silence_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [
        Failure(Unavailable("etcd did not answer"), True, False),
        Failure(Unavailable("worker b did not answer"), False, False),
    ]

    def at(*_: object, **__: object) -> object:
        raise CallFailed(failures.pop(0))

    monkeypatch.setattr(Caller, "at", at)
    with kvstore.connect("127.0.0.1:1", "127.0.0.1:2") as store, pytest.raises(Unavailable, match=r"^etcd did not"):
        store.unpin("owner/" + "0" * 32)
    assert not failures
