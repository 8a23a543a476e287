"""Sockets: CURVE, replays on the wire, endpoints that make no sense, and what the command refuses."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import zmq
import zmq.auth

import kvstore
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.events.stream import END, TERM_BITS, Curve, EventBatch, Sockets, ended
from tests.cli.conftest import Run, serving
from tests.cli.conftest import run as run
from tests.events.subscriber import Subscriber
from tests.events.test_processes import on_root, store
from tests.kit.cases import for_each
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.stores import TINY

ANY = "tcp://127.0.0.1:0"


def test_with_curve_only_known_keys_hear_events(tmp_path: Path) -> None:
    clients = tmp_path / "clients"
    clients.mkdir()
    public, secret = zmq.auth.create_certificates(tmp_path, "server")
    zmq.auth.create_certificates(clients, "known")
    zmq.auth.create_certificates(tmp_path, "stranger")
    with closing(Sockets(ANY, ANY, Curve(secret, str(clients)))) as sockets:
        context = zmq.Context()
        key = zmq.auth.load_certificate(public)[0]
        known = _subscriber(context, sockets.publish, clients / "known.key_secret", key)
        stranger = _subscriber(context, sockets.publish, tmp_path / "stranger.key_secret", key)
        plain = _subscriber(context, sockets.publish, None, key)

        def heard() -> bool:
            sockets.send("kv@p@m", EventBatch(1, b"payload"))
            return bool(known.poll(20))

        eventually(heard)
        assert known.recv_multipart() == [b"kv@p@m", (1).to_bytes(8, "big"), b"payload"]
        assert not stranger.poll(0) and not plain.poll(0)
        context.destroy(0)


def test_a_replay_is_asked_for_and_ended_as_vllm_does() -> None:
    with closing(Sockets(ANY, ANY)) as sockets:
        context = zmq.Context()
        asking = context.socket(zmq.DEALER)
        asking.connect(sockets.replay)
        asking.send_multipart((b"odd",))
        asking.send_multipart((b"", (7).to_bytes(8, "big")))
        requests = list(sockets.requests(PATIENCE_S))
        while not requests:
            requests = list(sockets.requests(PATIENCE_S))
        assert [(each.seq, each.topic) for each in requests] == [(7, None)]
        assert sockets.reply(requests[0].client, [EventBatch(7, b"seven"), ended()]) == 2
        assert asking.recv_multipart() == [b"", (7).to_bytes(8, "big"), b"seven"]
        assert asking.recv_multipart() == [b"", END.to_bytes(8, "big"), b""]
        context.destroy(0)


def test_endpoints_that_cannot_be_bound_are_named(tmp_path: Path) -> None:
    with closing(Sockets(ANY, None)) as sockets:
        with pytest.raises(Unavailable, match="choose another port"):
            Sockets(sockets.publish, None)
    with pytest.raises(InvalidRequest, match="expected tcp"):
        Sockets("nowhere", None)
    with pytest.raises(InvalidRequest, match="no folder"):
        Sockets(ANY, None, Curve("none", str(tmp_path / "none")))


@for_each(
    "arguments, says",
    [
        (("--publish", "tcp://0.0.0.0:0"), "events carry prompts"),
        (("--publish", ANY, "--query", "0.0.0.0:0"), "plain HTTP"),
        (("--publish", ANY, "--curve-certificate", "x"), "go together"),
    ],
)
def test_prompts_are_not_served_to_others_by_mistake(
    run: Run, tmp_root: Path, arguments: tuple[str, ...], says: str
) -> None:
    result = run("events", "--root", str(tmp_root), *arguments)
    assert result.exit_code == 2
    assert says in str(result.exception or "") + result.output


def test_a_root_of_one_host_needs_no_etcd(tmp_root: Path) -> None:
    root = tmp_root / "root"
    with kvstore.open(root) as opened:
        store(opened.namespace("m", TINY), 1)
        with serving(tmp_root, "events", "--root", str(root), "--publish", ANY, "--replay", ANY) as running:
            subscriber = Subscriber(running.said["publish"], running.said["replay"])
            with closing(subscriber):
                eventually(lambda: len(subscriber.hashes) == 5 and subscriber.hashes == on_root(root))
                opened.namespace("m", TINY).clear()
                eventually(lambda: not subscriber.hashes)


def test_a_publisher_without_etcd_goes_on_above_the_numbers_of_the_one_before(tmp_root: Path) -> None:
    root = tmp_root / "root"
    with kvstore.open(root) as opened:
        store(opened.namespace("m", TINY), 1)
        first, second = _term(tmp_root, root), _term(tmp_root, root)
        assert 0 < first < second < 1 << 64 - TERM_BITS


def _term(folder: Path, root: Path) -> int:
    """The term of a publisher that runs for a moment."""
    with serving(folder, "events", "--root", str(root), "--publish", ANY, "--replay", ANY) as running:
        subscriber = Subscriber(running.said["publish"], running.said["replay"])
        with closing(subscriber):
            eventually(lambda: subscriber.hashes == on_root(root))
            assert subscriber.index.last is not None
            return subscriber.index.last >> TERM_BITS


def _subscriber(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, certificate: Path | None, server_key: bytes
) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.SUB)
    if certificate is not None:
        public, secret = zmq.auth.load_certificate(certificate)
        assert secret is not None
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    return socket
