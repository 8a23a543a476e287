"""The publisher of KV events: what it publishes, its loop, and how it is opened."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from urllib.parse import quote

from kvstore.core.clock import Clock, Ids, RandomIds, SystemClock
from kvstore.core.http_server import HttpServer
from kvstore.core.namespace import Namespace
from kvstore.errors import KVStoreError, Unavailable
from kvstore.events import stream as messages
from kvstore.events.index import Model, PendingDeletions, RootIndex
from kvstore.events.inventory import EventBlock
from kvstore.events.limits import EventLimits
from kvstore.events.query import Answers, application
from kvstore.events.stream import MEDIUM, Curve, EventBatch, Gone, ReplayQuery, Sockets, TopicLog, ended
from kvstore.meta.cluster import check_bound
from kvstore.meta.keys import Keys
from kvstore.meta.store import Absent, LeaseGone, LeaseId, MetadataStore, Put
from kvstore.root.identity import create_or_open
from kvstore.root.interface import Root
from kvstore.security.authentication import Authenticator

# The fence: of several publishers of one name one speaks, by a leased key in etcd.
#
# A speaker that gets no reply from etcd for its lease falls silent by its own clock before the key can expire. Its
# numbers begin at the revision of its key, so a subscriber can distinguish its batches from an earlier speaker's.


log = logging.getLogger(__name__)

AGAIN_S = 0.5
NEVER_S = float("-inf")


class Fence:
    """One publisher's part in the election. Used by one thread; ``step`` often."""

    def __init__(self, meta: MetadataStore, key: str, limits: EventLimits, clock: Clock, ids: Ids) -> None:
        self._meta = meta
        self._key = key
        self._limits = limits
        self._timeout_s = min(limits.meta_deadline_s, limits.lease_s / 2)
        self._clock = clock
        said = {"id": ids.fresh().hex(), "host": socket.gethostname(), "pid": os.getpid()}
        self._value = json.dumps(said).encode()
        self._lease: LeaseId | None = None
        self._heard_s = NEVER_S
        self._due_s = NEVER_S
        self._term = 0
        self._fails = False

    @property
    def term(self) -> int:
        """The revision at which this publisher was elected; 0 if it is not the speaker now."""
        speaks = self._term and self._clock.monotonic_s() < self._heard_s + self._limits.lease_s
        return self._term if speaks else 0

    def step(self) -> None:
        """Stands for election, or renews the lease, when it is time to. Raises nothing."""
        sent_s = self._clock.monotonic_s()
        if sent_s < self._due_s:
            return
        self._due_s = sent_s + (self._limits.lease_s / 5 if self._term else AGAIN_S)
        try:
            if self._term:
                self._renew(sent_s)
            else:
                self._stand(sent_s)
            self._fails = False
        except KVStoreError as error:
            log.log(logging.DEBUG if self._fails else logging.INFO, "events.fence %s", error)
            self._fails = True

    def close(self) -> None:
        """Revokes the lease, so that another publisher can speak immediately. Idempotent."""
        lease, self._lease, self._term = self._lease, None, 0
        if lease is not None:
            try:
                self._meta.revoke(lease, self._limits.meta_deadline_s)
            except KVStoreError as error:
                log.info("events.fence %s", error)  # it goes by itself

    def _renew(self, sent_s: float) -> None:
        assert self._lease is not None
        if self._meta.keep_alive(self._lease, self._timeout_s):
            if sent_s < self._heard_s + self._limits.lease_s:
                self._heard_s = sent_s
                return
            self.close()  # it was silent for too long: another one may have spoken
        self._lease, self._term = None, 0
        log.warning("events.silent the lease is over")

    def _stand(self, sent_s: float) -> None:
        found = self._meta.get(self._key, self._timeout_s)
        if found is None:
            self._lease = self._meta.grant(self._limits.lease_s, self._timeout_s)
            try:
                self._meta.txn((Absent(self._key),), (Put(self._key, self._value, self._lease),), self._timeout_s)
            except (LeaseGone, Unavailable):
                pass  # the put may have succeeded: only the key shows whether it did
            found = self._meta.get(self._key, self._timeout_s)
        if found is not None and found.value == self._value and found.lease == self._lease:
            self._heard_s, self._term = sent_s, found.create_revision
            log.info("events.speaks term=%d", self._term)
        elif self._lease is not None:
            self.close()


# The publisher: updates the index of the root, and publishes the differences while it is the speaker.
#
# A publisher that is not the speaker also follows the root, so its index is complete when it is elected. Then it
# publishes the marker and the whole index once, and differences from there on.


REPORT_S = 60.0
"""Shortest interval between two logged failures: an unreadable folder fails at every attempt."""

Send = Callable[[str, EventBatch], object]
"""Gives a batch of a topic to all subscribers. Never waits: who is too slow misses it, and sees that by its number."""


@dataclass(frozen=True, slots=True)
class PublishScope:
    """The names and the selection of what is published."""

    pod: str = "kvstore"
    """The publisher's name in topics. Publishers of one name elect one that speaks."""
    namespaces: frozenset[str] = frozenset()
    """Names of namespaces; all if empty."""
    tenants: frozenset[str] | None = None
    """Tenants; all if None. Those without one have the empty name."""
    medium: str = MEDIUM

    def wants(self, namespace: Namespace) -> bool:
        """True if a namespace is published."""
        is_named = not self.namespaces or namespace.name in self.namespaces
        return is_named and (self.tenants is None or namespace.tenant in self.tenants)

    def topic(self, namespace: Namespace) -> str:
        """Returns ``kv@POD@MODEL``; with a tenant, ``kv@POD.TENANT@MODEL``. An ``@`` in a name becomes ``%40``."""
        pod = self.pod + (f".{namespace.tenant}" if namespace.tenant else "")
        return f"kv@{_quoted(pod)}@{_quoted(namespace.name)}"


class Speaker:
    """One publisher. One thread steps."""

    def __init__(
        self,
        truth: RootIndex,
        fence: Fence,
        send: Send,
        scope: PublishScope,
        limits: EventLimits,
        clock: Clock,
    ) -> None:
        self._truth = truth
        self._fence = fence
        self._send = send
        self._scope = scope
        self._limits = limits
        self._clock = clock
        self._term = 0
        self._streams: dict[str, TopicLog] = {}
        self._said_s = 0.0
        self._reported_s = NEVER_S
        self.fails = False
        """True if the last step could not reach root or etcd: the next one can wait."""

    @property
    def speaks(self) -> bool:
        """True while this publisher is the speaker."""
        return bool(self._fence.term)

    def step(self) -> None:
        """One step. Errors of root and etcd are logged: the next step tries again."""
        self._fence.step()
        try:
            self._truth.step()
            self.fails = False
        except KVStoreError as error:
            self._report(error)
            self.fails = True
        differences = self._truth.settle()
        term = self._fence.term
        if not term:
            return
        if term != self._term:
            self._begin(term)
        else:
            for model, difference in differences:
                topic = self._stream_of(model)
                for events in messages.removed(difference.removed, self._scope.medium, self._limits.batch_blocks):
                    self._publish(topic, events)
                self._publish_stored(topic, difference.stored)
        if self._clock.monotonic_s() - self._said_s >= self._limits.heartbeat_s:
            self._beat()

    def _report(self, error: KVStoreError) -> None:
        now_s = self._clock.monotonic_s()
        is_news = now_s - self._reported_s >= REPORT_S
        log.log(logging.WARNING if is_news else logging.DEBUG, "events.failed %s", error)
        if is_news:
            self._reported_s = now_s

    def topics(self) -> list[str]:
        """Returns the topics that were spoken of."""
        return list(self._streams)

    def replay(self, topic: str, seq: int) -> Iterator[EventBatch]:
        """Yields what a subscriber misses from a number on: batches that are kept, or the marker and a snapshot.

        It may be taken bit by bit, with steps between.
        """
        stream = self._streams[topic]
        kept = stream.since(seq)
        if kept is not None:
            return iter(kept)
        models = [each for each in self._truth.models.values() if self._scope.topic(each.namespace) == topic]
        return self._snapshot(stream, models)

    def _snapshot(self, stream: TopicLog, models: list[Model]) -> Iterator[EventBatch]:
        parts = list[list[EventBlock]]()
        for model in models:
            parts.append(model.inventory.snapshot())
            self._fence.step()
        # The last batch has the number of the last batch published, so that the next one continues it. Two batches in a
        # row hold more than ``batch_blocks`` blocks, so there are no more of them than this.
        blocks_max, last = self._limits.batch_blocks, stream.last
        most = 1 + sum(2 * (len(blocks) // blocks_max + 1) for blocks in parts)
        number = last - most
        yield EventBatch(number, self._encoded([messages.cleared()]))
        for blocks in parts:
            for events in messages.stored(blocks, self._scope.medium, blocks_max):
                number += 1
                assert number < last
                yield EventBatch(number, self._encoded(events))
                self._fence.step()
        yield EventBatch(last, self._encoded([]))

    def _begin(self, term: int) -> None:
        """Begins to speak: the marker and everything, for each topic."""
        self._term, self._streams = term, {}
        self._truth.close()  # etcd may be another one than before, restored from a snapshot
        for model in list(self._truth.models.values()):
            self._publish_stored(self._stream_of(model), model.inventory.snapshot())

    def _stream_of(self, model: Model) -> str:
        """Returns the topic of a namespace; begins it with the marker if it is new."""
        topic = self._scope.topic(model.namespace)
        if topic not in self._streams:
            self._streams[topic] = TopicLog(self._term, self._limits)
            self._publish(topic, [messages.cleared()])
        return topic

    def _publish_stored(self, topic: str, blocks: list[EventBlock]) -> None:
        for events in messages.stored(blocks, self._scope.medium, self._limits.batch_blocks):
            self._publish(topic, events)
            self._fence.step()  # a snapshot of millions takes longer than the lease

    def _publish(self, topic: str, events: list[messages.Event]) -> None:
        """Publishes one batch, unless another publisher may speak by now: its marker makes up for what is left out."""
        if self._fence.term == self._term:
            self._send(topic, self._streams[topic].add(self._encoded(events)))

    def _beat(self) -> None:
        self._said_s = self._clock.monotonic_s()
        for topic in self._streams:
            self._publish(topic, [])

    def _encoded(self, events: list[messages.Event]) -> bytes:
        return messages.encoded(events, self._clock.now_s())


# The loop of a publisher: news of the root, batches, and replays for subscribers, in one thread.
#
# Replays go out bit by bit between the steps, one at a time, so that snapshots for some subscribers delay neither
# removals for the others nor the keepalive of the lease.


REPLAYS_MAX = 64
"""Replays under way; further requests are dropped, and their clients ask again."""
TURN_BATCHES = 8
PATIENCE_S = 30.0
"""A client that takes nothing for so long is given up."""


@dataclass(slots=True)
class _Replay:
    client: bytes
    batches: Iterator[EventBatch]
    moved_s: float
    waiting: deque[EventBatch] = field(default_factory=deque)


class EventPublisher:
    """An open publisher. ``run`` it in one thread, then close it. Made by ``open_publisher``."""

    def __init__(
        self, truth: RootIndex, speaker: Speaker, sockets: Sockets, query: str, limits: EventLimits, clock: Clock
    ) -> None:
        self.publish, self.replay, self.query = sockets.publish, sockets.replay, query
        """Where it listens."""
        self.speaker = speaker
        self._truth = truth
        self._sockets = sockets
        self._limits = limits
        self._clock = clock
        self._replays = deque[_Replay]()
        self.undo = ExitStack()

    def close(self) -> None:
        """Ends everything; another publisher of this name can speak immediately. Idempotent."""
        self.undo.close()

    def run(self, ended: Callable[[], bool]) -> None:
        """Works until ``ended``."""
        while not ended():
            self.step()

    def step(self) -> None:
        """Answers requests, and does one step; pauses before it if there is nothing to do."""
        is_busy = (self._truth.is_busy and not self.speaker.fails) or bool(self._replays)
        for request in self._sockets.requests(0.0 if is_busy else self._limits.step_s):
            self._begin(request)
        if self._replays:
            replay = self._replays.popleft()
            if self._advance(replay):
                self._replays.append(replay)
        self.speaker.step()

    def _begin(self, request: ReplayQuery) -> None:
        if len(self._replays) >= REPLAYS_MAX:
            return
        self._replays.append(_Replay(request.client, self._batches(request), self._clock.monotonic_s()))

    def _batches(self, request: ReplayQuery) -> Iterator[EventBatch]:
        """Yields what a request asks for. Nothing but the end if another publisher speaks."""
        for topic in self.speaker.topics() if self.speaker.speaks else ():
            if request.topic in (None, topic):
                yield from self.speaker.replay(topic, request.seq)
        yield ended()

    def _advance(self, replay: _Replay) -> bool:
        """Sends some of a replay; False once it is over."""
        while len(replay.waiting) < TURN_BATCHES and (batch := next(replay.batches, None)) is not None:
            replay.waiting.append(batch)
        try:
            sent = self._sockets.reply(replay.client, replay.waiting)
        except Gone as gone:
            log.info("events.replay_gone %s", gone)
            return False
        for _ in range(sent):
            replay.waiting.popleft()
        now_s = self._clock.monotonic_s()
        if sent:
            replay.moved_s = now_s
        return bool(replay.waiting or sent) and now_s - replay.moved_s < PATIENCE_S


# A publisher put together: root, etcd, sockets and the answers for those who ask.


@dataclass(frozen=True, slots=True)
class At:
    """Where a publisher listens. Endpoints are ZeroMQ's; ``query`` is ``host`` and ``port``."""

    publish: str
    replay: str | None = None
    query: tuple[str, int] = ("127.0.0.1", 0)
    curve: Curve | None = None
    authenticator: Authenticator | None = None


def open_publisher(root: Root, meta: MetadataStore, scope: PublishScope, at: At) -> EventPublisher:
    """Opens a publisher on a root and its metadata, which stay the caller's to close.

    Raises RootMismatch, InvalidRequest, Unavailable.
    """
    limits, clock, ids = EventLimits(), SystemClock(), RandomIds()
    identity = create_or_open(root, ids, create=False)
    check_bound(meta, root.url, identity.root)
    keys = Keys(identity.root)
    with ExitStack() as undo:
        truth = RootIndex(root, identity.shard_bits, PendingDeletions(meta, keys, limits), scope.wants, limits, clock)
        undo.callback(truth.close)
        sockets = Sockets(at.publish, at.replay, at.curve)
        undo.callback(sockets.close)
        fence = Fence(meta, keys.speaker(scope.pod), limits, clock, ids)
        undo.callback(fence.close)
        speaker = Speaker(truth, fence, sockets.send, scope, limits, clock)
        answers = Answers(truth, scope.pod, scope.medium)
        serving = HttpServer(application(answers.answer, at.authenticator), *at.query)
        undo.callback(serving.close)
        publisher = EventPublisher(truth, speaker, sockets, serving.address, limits, clock)
        publisher.undo = undo.pop_all()
        return publisher


def _quoted(text: str) -> str:
    """Quotes what separates the parts of a topic; anything else stays readable."""
    return quote(text, safe="/:.-_~ ")
