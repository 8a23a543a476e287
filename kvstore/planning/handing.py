"""Which group of a plan goes out next, while several consumers take, finish, and die. Decisions only, no threads.

    waiting -> taken -> done          a consumer ran all members
               taken -> waiting       it died, or gave the group back
               taken -> failed        as often as is allowed

Groups go out in the plan's order; one that was given back goes first again.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from heapq import heappop, heappush

from kvstore.planning.group import Group


class State(Enum):
    """The state of a group."""

    WAITING = "waiting"
    TAKEN = "taken"
    DONE = "done"
    FAILED = "failed"


ENDS = (State.DONE, State.FAILED)


class Handing:
    """The states of all groups, by index in the plan. Not thread-safe.

    The prefixes of groups that are taken or prefetched never sum to more than ``memory_tokens``, but for one group that
    alone does.
    """

    def __init__(self, groups: Sequence[Group], memory_tokens: int, attempts_max: int) -> None:
        self._groups = groups
        self._memory_tokens = memory_tokens
        self._attempts_max = attempts_max
        self._states = [State.WAITING] * len(groups)
        self._attempts = [0] * len(groups)
        self._returned: list[int] = []
        self._next = 0
        self._tokens_taken = 0
        self._ended = 0

    @property
    def is_over(self) -> bool:
        """True once every group is done or has failed."""
        return self._ended == len(self._groups)

    @property
    def failed(self) -> list[int]:
        """The groups that were given back too often."""
        return [index for index, state in enumerate(self._states) if state is State.FAILED]

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
        self._states[index] = State.TAKEN
        self._attempts[index] += 1
        self._tokens_taken += prefix
        return index

    def done(self, index: int) -> None:
        """All members of a taken group were run."""
        self._leave(index, State.DONE)

    def give_back(self, index: int) -> None:
        """A taken group was not finished: it goes out again, unless it did so too often."""
        if self._attempts[index] >= self._attempts_max:
            self._leave(index, State.FAILED)
        else:
            self._leave(index, State.WAITING)
            heappush(self._returned, index)

    def ahead(self, count: int) -> list[int]:
        """The next ``count`` groups that wait, as far as their prefixes fit into memory beside those taken."""
        room = self._memory_tokens - self._tokens_taken
        found: list[int] = []
        fresh = range(self._next, min(len(self._groups), self._next + count))
        for index in [*sorted(self._returned), *fresh][:count]:
            room -= self._groups[index].prefix_tokens
            if room < 0:
                break
            found.append(index)
        return found

    def still_needed(self, index: int) -> int:
        """Leading tokens of a group's prefix that groups which have not ended share."""
        return max(self._shared(index, 1), self._shared(index, -1))

    def _shared(self, index: int, step: int) -> int:
        """Tokens shared with the nearest group in one direction that has not ended: those farther share no more."""
        shared, at = self._groups[index].prefix_tokens, index
        while shared and 0 <= at + step < len(self._groups):
            # Between two neighbours lies what the first member of the later one shares with the prompt before it.
            shared = min(shared, self._groups[max(at, at + step)].shared_before)
            at += step
            if self._states[at] not in ENDS:
                return shared
        return 0

    def _leave(self, index: int, state: State) -> None:
        assert self._states[index] is State.TAKEN, f"group {index} is {self._states[index].value}, and not taken"
        self._states[index] = state
        self._tokens_taken -= self._groups[index].prefix_tokens
        self._ended += state in ENDS
