"""A run of a plan: its groups, one after another, to any number of threads, held in the store while they run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from kvstore.brief import brief
from kvstore.checks import is_whole
from kvstore.client.consumers import Sharing
from kvstore.client.keeping import Held, Keeping
from kvstore.client.operation import Operation
from kvstore.client.owner import Owner
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.planning import Group, Handing, Plan

LOOK_S = 0.2
"""Interval at which a consumer that waits looks for others that have died."""
AHEAD_MAX = 32


@dataclass(slots=True)
class _Taker:
    """The consumer of a group, and what the store holds for it."""

    is_alive: Callable[[], bool]
    held: Held | None = None


class Run:
    """Hands out the groups of a plan in order. Use it as a context. Thread-safe.

    Each thread takes groups by itself, by ``for group in run`` or with ``take``. Before a group is handed out, what the
    store has of its prefix is held, and that of the next ones is being brought into memory. When the group is done, the
    prefix is the first to be evicted again, but for what other groups still need of it. The prefixes of the groups in
    use never exceed the plan's ``memory_tokens``; a consumer waits for that.

    A group is given back, and goes out again, if its consumer raises, closes its iterator or ends as a thread. After
    the third time it is in ``failed``.
    """

    def __init__(self, plan: Plan, keeping: Keeping, ahead: int, attempts: int) -> None:
        if not is_whole(ahead) or not 0 <= ahead <= AHEAD_MAX:
            raise InvalidRequest(f"ahead={brief(ahead)}: expected 0 to {AHEAD_MAX} groups")
        if not is_whole(attempts) or attempts < 1:
            raise InvalidRequest(f"attempts={brief(attempts)}: expected a whole number, 1 or more")
        self._owner = Owner()
        self._groups = plan.groups
        self._keeping = keeping
        self._ahead = int(ahead)
        self._changed = threading.Condition()
        self._handing = Handing(plan.groups, plan.memory_tokens, int(attempts))
        self._takers: dict[int, _Taker] = {}
        self._prefetches: dict[int, list[Operation]] = {}
        self._is_closed = False

    @property
    def is_over(self) -> bool:
        """True once every group is done or has failed, or the run was closed."""
        with self._changed:
            return self._is_closed or self._handing.is_over

    @property
    def failed(self) -> list[Group]:
        """Groups that were given back too often; their members may have run in part."""
        with self._changed:
            return [self._groups[index] for index in self._handing.failed]

    def __iter__(self) -> Iterator[Group]:
        """Yields groups. The one before is done when the next is asked for."""
        while (taken := self.take()) is not None:
            with taken:
                yield taken.group

    def take(self) -> Taken | None:
        """Takes the next group, for this thread; None once all groups are done. Use it as a context.

        Waits while others run the last groups, because one of them may give its group back. What this thread took and
        has not finished counts too: finish it first.
        """
        me = threading.current_thread()
        while not self.is_over:
            taken = self.try_take(LOOK_S, me.is_alive)
            if taken is not None:
                return taken
        return None

    def try_take(self, wait_s: float, is_alive: Callable[[], bool]) -> Taken | None:
        """Takes the next group if one is there within ``wait_s``; the consumer lives as long as ``is_alive``."""
        self._owner.check()
        self._give_back_of_dead()
        ends_s = time.monotonic() + wait_s
        taker = _Taker(is_alive)
        with self._changed:
            while (index := self._take(taker)) is None:
                left_s = ends_s - time.monotonic()
                if left_s <= 0 or self._is_closed or self._handing.is_over:
                    break
                self._changed.wait(left_s)
        if index is None:
            return None
        try:
            held = self._keeping.hold(self._groups[index])
            with self._changed:
                is_ours = self._takers.get(index) is taker
                if is_ours:
                    taker.held = held
            if not is_ours and held is not None:
                held.release()  # the run was closed meanwhile
            self._prefetch()
        except BaseException:
            self._leave(index, taker, is_done=False)
            raise
        return Taken(self._groups[index], lambda is_done: self._leave(index, taker, is_done=is_done))

    def share(self) -> Sharing:
        """Shares the run with other processes of this host: ``with run.share() as shared: ...``.

        ``shared`` can be sent to them, as an argument of multiprocessing, say; each takes groups by ``for group in
        shared``. A process that dies gives its group back. Threads of this process may take groups as well.
        """
        self._owner.check()
        return Sharing(self)

    def close(self) -> None:
        """Ends the run: releases what is held, and cancels what is being brought. Idempotent."""
        with self._changed:
            self._is_closed = True
            takers, self._takers = list(self._takers.values()), {}
            prefetches, self._prefetches = list(self._prefetches.values()), {}
            self._changed.notify_all()
        if self._owner.is_here:
            for taker in takers:
                if taker.held is not None:
                    taker.held.release()
            _cancel(each for operations in prefetches for each in operations)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, taker: _Taker) -> int | None:
        index = None if self._is_closed else self._handing.take()
        if index is not None:
            self._takers[index] = taker
        return index

    def _give_back_of_dead(self) -> None:
        with self._changed:
            dead = [(index, taker) for index, taker in self._takers.items() if not taker.is_alive()]
        for index, taker in dead:
            self._leave(index, taker, is_done=False)

    def _prefetch(self) -> None:
        """Begins to bring the next groups that nobody has begun to bring."""
        with self._changed:
            wanted = [] if self._is_closed else self._handing.ahead(self._ahead)
            wanted = [index for index in wanted if index not in self._prefetches]
            self._prefetches.update({index: [] for index in wanted})
        for index in wanted:
            begun = self._keeping.prefetch(self._groups[index])
            with self._changed:
                is_wanted = index in self._prefetches
                if is_wanted:
                    self._prefetches[index] = begun
            if not is_wanted:
                _cancel(begun)

    def _leave(self, index: int, taker: _Taker, *, is_done: bool) -> None:
        """Ends a consumer's work on a group. Does nothing if the group is no longer its own."""
        with self._changed:
            if self._takers.get(index) is not taker:
                return
            del self._takers[index]
            if is_done:
                self._handing.done(index)
            else:
                self._handing.give_back(index)
            still_needed = self._handing.still_needed(index)
            begun = self._prefetches.pop(index, [])
            self._changed.notify_all()
        if taker.held is not None:
            taker.held.release()
        _cancel(begun)
        if is_done:
            self._keeping.retire(self._groups[index], still_needed)


def _cancel(operations: Iterable[Operation]) -> None:
    with suppress(KVStoreError):  # a worker that does not answer keeps the other calls waiting, too
        for operation in operations:
            operation.cancel()


class Taken:
    """A group in the hands of one consumer. As a context it is done at the end, or given back if the block raises."""

    def __init__(self, group: Group, leave: Callable[[bool], None]) -> None:
        self.group = group
        self._leave = leave

    def done(self) -> None:
        """All members were run. Idempotent."""
        self._leave(True)

    def give_back(self) -> None:
        """The group goes out again. Does nothing if it is done."""
        self._leave(False)

    def __enter__(self) -> Taken:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave(kind is None)
