"""A run of a plan: its groups, one after another, to threads of this process, held in the store while they run.

A thread that ends, in whatever way, gives its group back (rule H3 of PLANNING.md).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from kvstore.batch.prompts import Group, PromptSet
from kvstore.core.address import TokenArray
from kvstore.core.validate import brief, is_whole
from kvstore.errors import InvalidRequest, KVStoreError

if TYPE_CHECKING:
    from kvstore.batch.plan import Plan
    from kvstore.client.cache import Cache, Hold
    from kvstore.client.operation import Operation


# The store's part in a plan and its runs: what it has of prompts, and a group's prefix brought into memory and held.
#
# All of it only saves time. What the store refuses is done without, so nothing that a run calls raises for it.


MEMBERS_MAX = 8
"""Members of a group that are brought into memory ahead; those behind them come as they are read."""


class Storage:
    """No store: it has nothing. Thread-safe, as that which follows."""

    def stored(self, wanted: list[tuple[int, int]]) -> list[int]:
        """Returns how many of the leading chunks it has, of each prompt by index and number of chunks."""
        return [0] * len(wanted)

    def hold(self, group: Group) -> Hold | None:
        """Holds what is stored of a group's prefix; None if there is nothing to hold."""
        return None

    def prefetch(self, group: Group) -> Sequence[Operation]:
        """Begins to bring what is stored of a group's prefix, and of its first members, into memory."""
        return ()


class TokenStorage(Storage):
    """Prompts given as tokens."""

    def __init__(self, cache: Cache, prompts: PromptSet) -> None:
        self._cache = cache
        self._prompts = prompts
        self._has_memory = True

    def stored(self, wanted: list[tuple[int, int]]) -> list[int]:
        size = self._cache.layout.chunk_tokens
        counts = self._cache.match_each(self._prompts.tokens(at, chunks * size) for at, chunks in wanted)
        return [count // size for count in counts]

    def hold(self, group: Group) -> Hold | None:
        # Of a prompt that shares nothing, what the store has.
        leading = group.prefix_tokens or group.stored[0]
        with suppress(KVStoreError):
            return self._cache.hold(self._prompts.tokens(group.members[0], leading)) if leading else None
        return None

    def prefetch(self, group: Group) -> Sequence[Operation]:
        stored = dict(zip(group.members[:MEMBERS_MAX], group.stored, strict=False))
        wanted = {index: count for index, count in stored.items() if count > group.prefix_tokens}
        if not wanted and group.stored_tokens:
            wanted = {group.members[0]: group.stored_tokens}
        begun = (self._prefetch(self._prompts.tokens(index, count)) for index, count in wanted.items())
        return [each for each in begun if each is not None]

    def _prefetch(self, tokens: TokenArray) -> Operation | None:
        try:
            return self._cache.prefetch(tokens) if self._has_memory else None
        except InvalidRequest:
            self._has_memory = False  # a node without a memory tier: reads come from the root
        except KVStoreError:
            pass
        return None


# Which group of a plan goes out next, while several consumers take, finish, and die. Decisions only, no threads.
#
# waiting -> taken -> done a consumer ran all members taken -> waiting it died, or gave the group back taken -> failed
# as often as is allowed
#
# Groups go out in the plan's order; one that was given back goes first again.


class GroupStates:
    """Which groups wait, are taken or have ended, by index in the plan. Not thread-safe.

    The prefixes of taken or prefetched groups never sum to more than ``memory_tokens``, except for a single group whose
    prefix is longer.
    """

    def __init__(self, groups: Sequence[Group], memory_tokens: int, attempts_max: int) -> None:
        self._groups = groups
        self._memory_tokens = memory_tokens
        self._attempts_max = attempts_max
        self._taken: set[int] = set()
        self._attempts = [0] * len(groups)
        self._returned: list[int] = []
        self._next = 0
        self._tokens_taken = 0
        self._ended = 0
        self.failed: list[int] = []
        """The groups that were given back too often."""

    @property
    def is_over(self) -> bool:
        """True once every group is done or has failed."""
        return self._ended == len(self._groups)

    def take(self) -> int | None:
        """Takes the next group; None if none is waiting, or memory is full of what others run."""
        index = self._returned[0] if self._returned else self._next
        if index >= len(self._groups):
            return None
        prefix = self._groups[index].prefix_tokens
        if self._tokens_taken and self._tokens_taken + prefix > self._memory_tokens:
            return None
        if self._returned:
            heappop(self._returned)
        else:
            self._next += 1
        self._taken.add(index)
        self._attempts[index] += 1
        self._tokens_taken += prefix
        return index

    def done(self, index: int) -> None:
        """All members of a taken group were run."""
        self._leave(index)
        self._ended += 1

    def give_back(self, index: int) -> None:
        """A taken group was not finished: it goes out again, unless it did so too often."""
        if self._attempts[index] >= self._attempts_max:
            self.done(index)
            self.failed.append(index)
        else:
            self._leave(index)
            heappush(self._returned, index)

    def ahead(self, count: int) -> list[int]:
        """The next ``count`` groups that wait, as far as their prefixes fit into memory next to those taken."""
        room = self._memory_tokens - self._tokens_taken
        found: list[int] = []
        fresh = range(self._next, min(len(self._groups), self._next + count))
        for index in [*sorted(self._returned), *fresh][:count]:
            room -= self._groups[index].prefix_tokens
            if room < 0:
                break
            found.append(index)
        return found

    def _leave(self, index: int) -> None:
        self._taken.remove(index)
        self._tokens_taken -= self._groups[index].prefix_tokens


LOOK_S = 0.2
"""Interval at which a consumer that waits looks for others that have died."""
AHEAD_MAX = 32


@dataclass(slots=True)
class _Taker:
    """The consumer of a group, and what the store holds for it."""

    is_alive: Callable[[], bool]
    held: Hold | None = None


class Run:
    """Hands out the groups of a plan in order. Use it as a context. Thread-safe.

    Each thread takes groups by itself, by ``for group in run`` or with ``take``. Before a group is handed out, what the
    store has of its prefix is held, and that of the next ones is being brought into memory. The prefixes of the groups
    in use never exceed the plan's ``memory_tokens``; a consumer waits for that.

    A group is given back, and goes out again, if its consumer raises, closes its iterator or ends as a thread. After
    the third time it is in ``failed``.
    """

    def __init__(self, plan: Plan, ahead: int, attempts: int) -> None:
        if not is_whole(ahead) or not 0 <= ahead <= AHEAD_MAX:
            raise InvalidRequest(f"ahead={brief(ahead)}: expected 0 to {AHEAD_MAX} groups")
        if not is_whole(attempts) or attempts < 1:
            raise InvalidRequest(f"attempts={brief(attempts)}: expected a whole number, 1 or more")
        self._pid = os.getpid()
        self._groups = plan.groups
        self._storage = plan.storage
        self._ahead = int(ahead)
        self._changed = threading.Condition()
        self._handing = GroupStates(plan.groups, plan.memory_tokens, int(attempts))
        self._takers: dict[int, _Taker] = {}
        self._prefetches: dict[int, Sequence[Operation]] = {}
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

    def take(self) -> LeasedGroup | None:
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

    def try_take(self, wait_s: float, is_alive: Callable[[], bool]) -> LeasedGroup | None:
        """Takes the next group if one is there within ``wait_s``; the consumer lives as long as ``is_alive``."""
        if self._pid != os.getpid():
            raise InvalidRequest("the run was made before a fork: run the plan in the child")
        with self._changed:
            dead = [(index, taker) for index, taker in self._takers.items() if not taker.is_alive()]
        for each, gone in dead:
            self._leave(each, gone, is_done=False)
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
            held = self._storage.hold(self._groups[index])
            with self._changed:
                is_ours = self._takers.get(index) is taker
                if is_ours:
                    taker.held = held
            if not is_ours and held is not None:
                held.release()  # the run was closed before the prefix was held
            self._prefetch()
        except BaseException:
            self._leave(index, taker, is_done=False)
            raise
        return LeasedGroup(self._groups[index], lambda is_done: self._leave(index, taker, is_done=is_done))

    def close(self) -> None:
        """Ends the run: releases what is held, and cancels what is being brought. Idempotent."""
        with self._changed:
            self._is_closed = True
            takers, self._takers = list(self._takers.values()), {}
            prefetches, self._prefetches = list(self._prefetches.values()), {}
            self._changed.notify_all()
        if self._pid == os.getpid():
            for taker in takers:
                if taker.held is not None:
                    taker.held.release()
            _cancel(one for each in prefetches for one in each)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, taker: _Taker) -> int | None:
        index = None if self._is_closed else self._handing.take()
        if index is not None:
            self._takers[index] = taker
        return index

    def _prefetch(self) -> None:
        """Begins to prefetch the next groups that are not being prefetched."""
        with self._changed:
            wanted = [] if self._is_closed else self._handing.ahead(self._ahead)
            wanted = [index for index in wanted if index not in self._prefetches]
            self._prefetches.update(dict.fromkeys(wanted, ()))
        for index in wanted:
            begun = self._storage.prefetch(self._groups[index])
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
            begun = self._prefetches.pop(index, ())
            self._changed.notify_all()
        if taker.held is not None:
            taker.held.release()
        _cancel(begun)


def _cancel(prefetches: Iterable[Operation]) -> None:
    with suppress(KVStoreError):  # a worker that does not answer keeps the other calls waiting, too
        for each in prefetches:
            each.cancel()


class LeasedGroup:
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

    def __enter__(self) -> LeasedGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave(kind is None)
