"""The publisher: brings the truth up to date, and tells the differences while it is the speaker.

A publisher that is not the speaker follows the root all the same, so it knows everything when it is elected. Then it
tells the marker and all that it knows, once, and differences from there on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Protocol

from kvstore.errors import KVStoreError
from kvstore.events import messages
from kvstore.events.fence import Fence
from kvstore.events.inventory import Difference
from kvstore.events.limits import EventLimits
from kvstore.events.messages import Naming
from kvstore.events.stream import Batch, Stream
from kvstore.events.table import Rows
from kvstore.events.truth import Model, Truth
from kvstore.namespace import Namespace
from kvstore.sources import Clock

log = logging.getLogger(__name__)

Send = Callable[[str, Batch], object]
"""Gives a batch of a topic to all subscribers. Never waits: who is too slow misses it, and sees that by its number."""


class Topics(Protocol):
    """Names topics."""

    def __call__(self, namespace: Namespace) -> str:
        """Returns the topic of a namespace."""
        ...


class Speaker:
    """One publisher. One thread steps."""

    def __init__(
        self,
        truth: Truth,
        fence: Fence,
        send: Send,
        topic_of: Topics,
        naming: Naming,
        limits: EventLimits,
        clock: Clock,
    ) -> None:
        self._truth = truth
        self._fence = fence
        self._send = send
        self._topic_of = topic_of
        self._naming = naming
        self._limits = limits
        self._clock = clock
        self._term = 0
        self._streams: dict[str, Stream] = {}
        self._said_s = 0.0
        self.replaying = 0
        """Replays that are under way: while there are some, rows keep their numbers."""

    @property
    def speaks(self) -> bool:
        """True while this publisher is the speaker."""
        return bool(self._fence.term)

    def step(self) -> None:
        """One step. Errors of root and etcd are logged: the next step tries again."""
        self._fence.step()
        try:
            self._truth.step()
        except KVStoreError as error:
            log.warning("events.failed %s", error)
        differences = self._truth.settle()
        term = self._fence.term
        if not term:
            return
        if term != self._term:
            self._begin(term)
        else:
            for model, difference in differences:
                self._tell(model, difference)
        if self._clock.monotonic_s() - self._said_s >= self._limits.heartbeat_s:
            self._beat()
        if not self.replaying:
            self._truth.compact()

    def topics(self) -> list[str]:
        """Returns the topics that were spoken of."""
        return list(self._streams)

    def replay(self, topic: str, seq: int) -> Iterator[Batch]:
        """Yields what a subscriber misses from a number on: batches that are kept, or the marker and a snapshot.

        It may be taken bit by bit, with steps between; count it in ``replaying`` for as long.
        """
        stream = self._streams[topic]
        kept = stream.since(seq)
        if kept is not None:
            return iter(kept)
        parts = [(model, model.inventory.snapshot()) for model in self._models(topic)]
        return self._snapshot(stream, parts)

    def _snapshot(self, stream: Stream, parts: list[tuple[Model, Rows]]) -> Iterator[Batch]:
        # The last batch has the number of the last batch published, so that the next one continues it. Two batches in a
        # row hold more than ``batch_blocks`` blocks, so there are no more of them than this.
        blocks_max, last = self._limits.batch_blocks, stream.last
        most = 1 + sum(2 * (len(rows) // blocks_max + 1) for _, rows in parts)
        number = last - most
        yield Batch(number, self._encoded([messages.cleared()]))
        for model, rows in parts:
            for events in messages.stored(model.inventory, rows, self._naming, blocks_max):
                number += 1
                assert number < last
                yield Batch(number, self._encoded(events))
        yield Batch(last, self._encoded([]))

    def _begin(self, term: int) -> None:
        """Begins to speak: the marker and everything, for each topic."""
        self._term, self._streams = term, {}
        for model in list(self._truth.models.values()):
            rows = model.inventory.snapshot()
            self._publish_stored(self._stream_of(model), model, rows)

    def _stream_of(self, model: Model) -> str:
        """Returns the topic of a namespace; begins it with the marker if it is new."""
        topic = self._topic_of(model.namespace)
        if topic not in self._streams:
            self._streams[topic] = Stream(self._term, self._limits)
            self._publish(topic, [messages.cleared()])
        return topic

    def _tell(self, model: Model, difference: Difference) -> None:
        topic = self._stream_of(model)
        blocks_max = self._limits.batch_blocks
        for events in messages.removed(model.inventory, difference.removed, self._naming, blocks_max):
            self._publish(topic, events)
        self._publish_stored(topic, model, difference.stored)

    def _publish_stored(self, topic: str, model: Model, rows: Rows) -> None:
        for events in messages.stored(model.inventory, rows, self._naming, self._limits.batch_blocks):
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

    def _models(self, topic: str) -> list[Model]:
        return [model for model in self._truth.models.values() if self._topic_of(model.namespace) == topic]
