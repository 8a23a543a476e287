"""Prefetches, moves and releases, as tickets: a caller that knows the next requests prepares a node for them.

Separate from reads and puts, because nobody waits here: few threads, a bounded number of tickets, and a deadline on
each. ``moving.py`` does the work of a ticket.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Literal

from kvstore.address import Chain
from kvstore.background import Decision, Loop
from kvstore.brief import brief
from kvstore.errors import InvalidRequest, KVStoreError, Overloaded, Unavailable
from kvstore.node.lanes import Deadline
from kvstore.node.limits import CurrentLimits
from kvstore.sources import Clock

log = logging.getLogger(__name__)

MOVERS = 4


class Act(enum.Enum):
    """The operation on the chunks of a prompt."""

    PREFETCH = "prefetch"
    """Bring them to a tier; copies elsewhere stay."""
    MOVE = "move"
    """Bring them to a tier, and remove them from all nearer tiers."""
    RELEASE = "release"
    """Not needed soon: make them the first to go when memory or disk needs room, until they are used again."""


AheadName = Literal["memory", "disk"]
"""The tiers to prefetch to."""
LevelName = Literal["memory", "disk", "root"]


class Level(enum.Enum):
    """The tiers that a ticket can name, the nearest first."""

    MEMORY = "memory"
    DISK = "disk"
    ROOT = "root"

    @classmethod
    def of(cls, value: Level | str) -> Level:
        """Returns the tier with this name. Raises InvalidRequest."""
        for each in cls:
            if isinstance(value, Level | str) and value in (each, each.value):  # an array would be compared by item
                return each
        raise InvalidRequest(f"tier={brief(value)}: expected one of {', '.join(level.value for level in cls)}")


def check(act: Act, level: Level) -> None:
    """Raises InvalidRequest for a combination that makes no sense on any node."""
    if act is Act.PREFETCH and level is Level.ROOT:
        raise InvalidRequest("prefetch to tier='root': stored chunks are there already; expected memory or disk")


class Move:
    """One ticket and its progress. Thread-safe."""

    def __init__(self, chain: Chain, act: Act, level: Level, deadline: Deadline) -> None:
        self.chain = chain
        self.act = act
        self.level = level
        self.deadline = deadline
        self._changed = threading.Condition()
        self._chunks = 0
        self._is_begun = False
        self._is_done = False
        self._is_cancelled = False
        self._error: KVStoreError | None = None

    @property
    def chunks(self) -> int:
        """Number of leading chunks that it is done with."""
        return self._chunks

    @property
    def done(self) -> bool:
        """True once it has ended, one way or another; nothing is done for it any more then."""
        return self._is_done

    @property
    def error(self) -> KVStoreError | None:
        """The error that ended it early; None if nothing failed."""
        return self._error

    def wait(self, timeout_s: float | None = None, *, beyond: int | None = None) -> int:
        """Waits until it is done, past ``beyond`` chunks, or out of time; returns how many chunks it is done with."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_done or (beyond is not None and self._chunks > beyond), timeout_s)
            return self._chunks

    def cancel(self) -> None:
        """Ends it within its current step, or at once if it has not begun. Idempotent, never waits."""
        with self._changed:
            self._is_cancelled = True
            self._is_done = self._is_done or not self._is_begun
            self._changed.notify_all()

    # For the thread that does it

    def begin(self) -> bool:
        """Begins it; False if it was cancelled. A caller that gets True calls ``end``."""
        with self._changed:
            self._is_begun = not self._is_done
            return self._is_begun

    def goes_on(self) -> bool:
        """True if the next step should be done. Raises Unavailable if its time is over."""
        if self._is_cancelled:
            return False
        if self.deadline.passed:
            raise Unavailable(f"the {self.act.value} was not done in time: {self._chunks} of {len(self.chain)} chunks")
        return True

    def advance(self, chunks: int) -> None:
        """Notes that so many leading chunks are done now."""
        with self._changed:
            self._chunks = chunks
            self._changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Waits, unless it is cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_cancelled, seconds)

    def end(self, error: KVStoreError | None = None) -> None:
        """Notes that nothing is done for it any more."""
        with self._changed:
            self._error = error
            self._is_done = True
            self._changed.notify_all()


class Moves:
    """The tickets of one node: at most ``moves_max`` are unfinished. Thread-safe."""

    def __init__(self, work: Callable[[Move], None], limits: CurrentLimits, clock: Clock) -> None:
        """``work`` does one, in a thread of ours; it raises KVStoreError where that fails."""
        self._work = work
        self._limits = limits
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: deque[Move] = deque()
        self._doing: set[Move] = set()
        self._loop = Loop("kvstore-move", self._changed, self._next, threads_max=MOVERS)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._doing)

    def begin(self, chain: Chain, act: Act, level: Level) -> Move:
        """Queues a ticket. Raises Overloaded if too many are unfinished, Unavailable after ``close``."""
        limits = self._limits.now
        move = Move(chain, act, level, Deadline(self._clock, limits.move_deadline_s))
        with self._changed:
            if self._loop.closed:
                raise Unavailable("the store is closed: open it again")
            # Tickets cancelled while they waited do not count towards the limit.
            self._waiting = deque(each for each in self._waiting if not each.done)
            if len(self) >= limits.moves_max:
                raise Overloaded(f"{limits.moves_max} prefetches and moves are not done yet: back off")
            self._waiting.append(move)
            if len(self._loop.threads) < len(self):
                self._loop.start()
            self._changed.notify_all()
        return move

    def close(self, timeout_s: float) -> None:
        """Ends all tickets within their current steps, for which it waits at most ``timeout_s``. Idempotent."""
        with self._changed:
            self._loop.stop()
            waiting = [*self._waiting]
            self._waiting.clear()
            for move in self._doing:
                move.cancel()
        self._loop.close(timeout_s)
        for move in filter(Move.begin, waiting):
            move.end(Unavailable("the store was closed before this was begun"))

    def _next(self) -> Decision:
        while self._waiting:
            move = self._waiting.popleft()
            if move.begin():
                self._doing.add(move)
                return partial(self._do, move)
        return None

    def _do(self, move: Move) -> None:
        error: KVStoreError | None = None
        try:
            if move.goes_on():
                self._work(move)
        except KVStoreError as failed:
            error = failed
        except Exception:
            log.exception("moves.failed act=%s", move.act.value)
            error = Unavailable(f"the {move.act.value} failed; see the node's log")
        with self._changed:
            self._doing.discard(move)
        move.end(error)
