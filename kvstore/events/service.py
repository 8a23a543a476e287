"""The loop of a publisher: news of the root, batches, and replays for subscribers, in one thread.

A replay goes out bit by bit between the steps, so that a snapshot for one subscriber delays no removal for the others.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvstore.events.limits import EventLimits
from kvstore.events.sockets import Gone, Request, Sockets, ended
from kvstore.events.speaker import Speaker
from kvstore.events.stream import Batch
from kvstore.events.truth import Truth
from kvstore.sources import Clock

log = logging.getLogger(__name__)

REPLAYS_MAX = 64
"""Replays under way; further requests are dropped, and their clients ask again."""
TURN_BATCHES = 8
PATIENCE_S = 30.0
"""A client that takes nothing for so long is given up."""


@dataclass(slots=True)
class _Replay:
    client: bytes
    batches: Iterator[Batch]
    moved_s: float
    waiting: deque[Batch] = field(default_factory=deque)


class Service:
    """One publisher at work. ``run`` it in one thread."""

    def __init__(self, truth: Truth, speaker: Speaker, sockets: Sockets, limits: EventLimits, clock: Clock) -> None:
        self._truth = truth
        self._speaker = speaker
        self._sockets = sockets
        self._limits = limits
        self._clock = clock
        self._replays: list[_Replay] = []

    def run(self, ended: Callable[[], bool]) -> None:
        """Works until ``ended``."""
        while not ended():
            self.step()

    def step(self) -> None:
        """Answers requests, and does one step; pauses before it if there is nothing to do."""
        is_busy = self._truth.is_busy or bool(self._replays)
        for request in self._sockets.requests(0.0 if is_busy else self._limits.step_s):
            self._begin(request)
        self._replays = [replay for replay in self._replays if self._advance(replay)]
        self._speaker.replaying = len(self._replays)
        self._speaker.step()

    def _begin(self, request: Request) -> None:
        if len(self._replays) >= REPLAYS_MAX:
            return
        self._replays.append(_Replay(request.client, self._batches(request), self._clock.monotonic_s()))

    def _batches(self, request: Request) -> Iterator[Batch]:
        """Yields what a request asks for. Nothing but the end if another publisher speaks."""
        for topic in self._speaker.topics() if self._speaker.speaks else ():
            if request.topic in (None, topic):
                yield from self._speaker.replay(topic, request.seq)
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
