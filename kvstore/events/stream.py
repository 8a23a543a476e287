"""The batches of one topic: their sequence numbers, and those that are kept for subscribers who missed some. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.events.inventory import EventBlock
from kvstore.events.limits import EventLimits

TERM_BITS = 24
"""A speaker's numbers begin at its term times 2 to this: they are larger than those of all speakers before it."""
END = (1 << 64) - 1
"""The number that ends a replay, as vLLM has it: -1."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """One encoded batch and its number."""

    seq: int
    payload: bytes


class TopicLog:
    """One topic of one speaker. ``term`` is the revision at which it was elected. Used by one thread."""

    def __init__(self, term: int, limits: EventLimits) -> None:
        self._next = term << TERM_BITS
        self._limits = limits
        self._kept: deque[EventBatch] = deque()
        self._kept_bytes = 0

    @property
    def last(self) -> int:
        """The number of the last batch; there is one."""
        return self._next - 1

    def add(self, payload: bytes) -> EventBatch:
        """Numbers a batch, and keeps it for a while."""
        batch = EventBatch(self._next, payload)
        self._next += 1
        self._kept.append(batch)
        self._kept_bytes += len(payload)
        while len(self._kept) > self._limits.replay_batches or self._kept_bytes > self._limits.replay_bytes:
            self._kept_bytes -= len(self._kept.popleft().payload)
        return batch

    def since(self, seq: int) -> list[EventBatch] | None:
        """Returns all batches from a number on; None if that has to be a snapshot.

        It has to if batches are not kept any more, or are another speaker's.
        """
        if not self._kept or not self._kept[0].seq <= seq <= self._next:
            return None
        return [batch for batch in self._kept if batch.seq >= seq]


# Batches of events as ``vllm.distributed.kv_events`` of vLLM 0.32 encodes them, in msgpack.
#
# A batch is an array, an event a map with its type. Written out here, because the store does not depend on vLLM;
# tests hold them against the installed engine.


MEDIUM = "STORAGE"
"""Dynamo's indexer counts it if ``locality`` is unset, which the form of these messages has no field for."""
DATA_PARALLEL_RANK = 0

Event = dict[str, object]
_encode = msgspec.msgpack.Encoder().encode


def encoded(events: Sequence[Event], now_s: float) -> bytes:
    """Returns one batch; ``now_s`` is its time in seconds since the epoch."""
    return _encode([now_s, events, DATA_PARALLEL_RANK])


def cleared() -> Event:
    """The marker: forget everything of this publisher, a snapshot follows."""
    return {"type": "AllBlocksCleared"}


def removed(blocks: Sequence[EventBlock], medium: str, blocks_max: int) -> Iterator[list[Event]]:
    """Yields the events of batches that say that blocks are gone."""
    for start in range(0, len(blocks), blocks_max):
        gone = defaultdict[int | None, list[object]](list)
        for each in blocks[start : start + blocks_max]:
            gone[each.group].append(each.hash)
        yield [
            {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
            | ({} if group is None else {"group_idx": group})
            for group, hashes in gone.items()
        ]


def stored(blocks: Iterable[EventBlock], medium: str, blocks_max: int) -> Iterator[list[Event]]:
    """Yields the events of batches that say that blocks are there; ``blocks`` has parents before their children."""
    events: list[Event] = []
    count = 0
    for chain in _chains(blocks, blocks_max):
        if count and count + len(chain) > blocks_max:
            yield events
            events, count = [], 0
        events.append(_stored(chain, medium))
        count += len(chain)
    if events:
        yield events


def _stored(chain: Sequence[EventBlock], medium: str) -> Event:
    first = chain[0]
    event: Event = {
        "type": "BlockStored",
        "block_hashes": [each.hash for each in chain],
        "parent_block_hash": first.parent_hash,
        "token_ids": np.frombuffer(b"".join(each.tokens for each in chain), "<u4").tolist(),
        "block_size": len(first.tokens) // 4,
        "lora_id": None,
        "medium": medium,
        "lora_name": first.lora_name,
    }
    if first.group is not None:
        extra_keys = [each.extra_keys for each in chain]
        event["extra_keys"] = extra_keys if any(each is not None for each in extra_keys) else None
        event["group_idx"] = first.group
    return event


def _chains(blocks: Iterable[EventBlock], blocks_max: int) -> Iterator[list[EventBlock]]:
    """Cuts blocks into chains of one origin, in which each is the child of the one before it."""
    chain: list[EventBlock] = []
    for each in blocks:
        if chain:
            last = chain[-1]
            is_next = (each.parent, each.group, each.lora_name) == (last.address, last.group, last.lora_name)
            if not is_next or len(chain) == blocks_max:
                yield chain
                chain = []
        chain.append(each)
    if chain:
        yield chain


# ZeroMQ sockets as vLLM's publisher has them: PUB for batches, ROUTER for those who ask for what they missed.
#
# Frames of a batch are topic, number (8 bytes, big-endian) and payload. A request is an empty frame and the number to
# begin at, and may name a topic; its answer is an empty frame, number and payload for each batch, and -1 at the end.


SEND_MAX = 10_000
"""Batches that wait for a slow subscriber; the next ones it misses."""
REPLAY_SEND_MAX = 64
REQUESTS_MAX = 64
"""Requests taken in one turn."""
MESSAGE_BYTES_MAX = 4_096
"""The largest request that is read."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Files for CURVE: our certificate with its secret key, and a folder of the public keys that may connect."""

    certificate: str
    clients: str


@dataclass(frozen=True, slots=True)
class ReplayQuery:
    """A subscriber asks for batches from a number on; of all topics if ``topic`` is None."""

    client: bytes
    seq: int
    topic: str | None


class Sockets:
    """Both sockets, bound. Used by one thread.

    Raises InvalidRequest for an invalid endpoint or key, Unavailable for an endpoint that is in use.
    """

    def __init__(self, publish: str, replay: str | None, curve: Curve | None = None) -> None:
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._open: list[zmq.Socket[bytes]] = []
        try:
            if curve is not None:
                self._authenticator = _authenticator(self._context, curve)
            self._pub = self._bound(zmq.PUB, publish, SEND_MAX, curve)
            self._router = None if replay is None else self._bound(zmq.ROUTER, replay, REPLAY_SEND_MAX, curve)
            if self._router is not None:
                self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        except BaseException:
            self.close()
            raise
        self.publish = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where subscribers connect to, with the port that was chosen."""
        self.replay = "" if self._router is None else self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, topic: str, batch: EventBatch) -> None:
        """Publishes a batch. Never waits."""
        self._pub.send_multipart((topic.encode(), batch.seq.to_bytes(8, "big"), batch.payload))

    def requests(self, wait_s: float) -> Iterator[ReplayQuery]:
        """Yields requests for replay; waits up to ``wait_s`` for the first."""
        if self._router is None:
            self._pub.poll(int(wait_s * 1000), zmq.POLLERR)
            return
        if not self._router.poll(int(wait_s * 1000)):
            return
        for _ in range(REQUESTS_MAX):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            request = _request(frames)
            if request is not None:
                yield request

    def reply(self, client: bytes, batches: Iterable[EventBatch]) -> int:
        """Sends batches until the client takes no more for now; returns how many. Raises Gone if it went away."""
        assert self._router is not None
        sent = 0
        for batch in batches:
            try:
                self._router.send_multipart((client, b"", batch.seq.to_bytes(8, "big"), batch.payload), zmq.NOBLOCK)
            except zmq.Again:
                return sent
            except zmq.ZMQError as gone:
                raise Gone(str(gone)) from gone
            sent += 1
        return sent

    def close(self) -> None:
        """Closes both. Idempotent."""
        for socket in self._open:
            socket.close(linger=200)
        self._open = []
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._context.term()

    def _bound(self, kind: int, endpoint: str, send_max: int, curve: Curve | None) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._open.append(socket)
        socket.setsockopt(zmq.SNDHWM, send_max)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        if curve is not None:
            public, secret = _certificate(curve.certificate)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as cause:
            if cause.errno in (zmq.EADDRINUSE, zmq.EADDRNOTAVAIL):
                raise Unavailable(f"cannot listen on {endpoint}: {cause}; choose another port, 0 is any") from cause
            raise InvalidRequest(f"{endpoint}: {cause}; expected tcp://ADDRESS:PORT or ipc://PATH") from cause
        return socket


class Gone(Exception):
    """The client of a replay went away."""


def ended() -> EventBatch:
    """The end of a replay."""
    return EventBatch(END, b"")


def _request(frames: list[bytes]) -> ReplayQuery | None:
    """Parses a request; None for anything else."""
    if not 3 <= len(frames) <= 4 or frames[1] or len(frames[2]) != 8:
        return None
    topic = None if len(frames) == 3 else frames[3].decode(errors="replace")
    return ReplayQuery(frames[0], int.from_bytes(frames[2], "big"), topic)


def _authenticator(context: zmq.Context[zmq.Socket[bytes]], curve: Curve) -> ThreadAuthenticator:
    if not Path(curve.clients).is_dir():
        raise InvalidRequest(f"{curve.clients} is no folder: expected one of public keys that may subscribe")
    found = ThreadAuthenticator(context)
    found.start()
    found.configure_curve(domain="*", location=curve.clients)
    return found


def _certificate(path: str) -> tuple[bytes, bytes]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as cause:
        raise InvalidRequest(f"{path}: {cause}: expected a certificate of zmq.auth.create_certificates") from cause
    if secret is None:
        raise InvalidRequest(f"{path} has no secret key: give the file that ends in .key_secret")
    return public, secret
