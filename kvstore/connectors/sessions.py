"""Sessions of an engine: which branches of theirs were abandoned, told by the order of their requests.

Separate from any engine, because only chains of block names matter here. A name stands for its block and all before it,
as a chained hash does, so the common part of two chains ends where their names first differ.

A session that returns to a branch has abandoned what it did in between: a fork that was dropped, or an answer that was
written anew. A session that merely begins another branch has abandoned nothing, as far as anybody can tell: agents
fork, and go on with what they left (``python -m benchmarks.engine_blocks`` has the figures). So that needs a word of
the request, and a session that uses again what it seemed to have abandoned is not guessed about any more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

BRANCHES_MAX = 8
"""Branches that are remembered of one session."""
SESSIONS_MAX = 4_096
BLOCKS_MAX = 262_144
"""Blocks of all branches together: some 25 MB of hashes."""


class Names(Protocol):
    """The blocks of a prompt and of what was generated behind it, from the first on."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: int, /) -> Hashable: ...


@dataclass(slots=True, eq=False)
class Branch:
    """The last request of a session on one branch."""

    names: Names
    prompt: int
    """How many of the names are of full blocks of its prompt."""
    used_s: float
    """When the request ended."""
    stays: bool = False
    """True if the request said so: only another one's word ends it."""
    is_abandoned: bool = False


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The end of a branch that nobody needs as far as this engine knows: the names from ``first`` on."""

    names: Names
    first: int
    used_s: float


@dataclass(slots=True)
class _Session:
    branches: list[Branch] = field(default_factory=list)
    """In the order of their last use."""
    goes_on_apart: bool = False
    """True once it used a branch again that it seemed to have abandoned."""


class Sessions:
    """Remembers the branches of the sessions used last. Not thread-safe."""

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._blocks = 0

    def ended(
        self, name: str, branch: Branch, supersede: bool | None = None, running: Iterable[Names] = ()
    ) -> list[Abandoned]:
        """Notes that a request of a session ended; returns what the session has abandoned with it.

        ``supersede`` is the request's own word: True if the session has left all its other branches, False if they and
        this one stay, None to go by the order of requests. ``running`` are the names of unfinished requests. What they
        or other sessions share is not abandoned.
        """
        session = self._sessions.pop(name, None) or _Session()
        self._sessions[name] = session
        branch.stays = supersede is False
        lost = self._took(session, branch, supersede)
        others = list(running) if lost else []
        found = [Abandoned(each.names, self._kept(each, others), each.used_s) for each in lost]
        self._bound()
        return [each for each in found if each.first < len(each.names)]

    def _took(self, session: _Session, branch: Branch, supersede: bool | None) -> list[Branch]:
        """Adds a branch in place of the one that it goes on with; returns those that are abandoned with that."""
        branches = session.branches
        at = next((at for at in reversed(range(len(branches))) if _goes_on(branches[at], branch)), len(branches))
        left = branches[at:]
        if left:  # the branch that it goes on with, and those that the session used since
            session.goes_on_apart |= left[0].is_abandoned
            self._blocks -= len(branches.pop(at).names)
        if supersede:
            lost = branches[:at] + left
        elif supersede is False or session.goes_on_apart:
            lost = []
        else:
            lost = [each for each in left if not each.stays]
        lost = [each for each in lost if not each.is_abandoned]
        for each in lost:
            each.is_abandoned = True
        branches.append(branch)
        self._blocks += len(branch.names)
        while len(branches) > BRANCHES_MAX:
            self._blocks -= len(branches.pop(0).names)
        return lost

    def _kept(self, lost: Branch, running: Sequence[Names]) -> int:
        """Returns how many leading blocks of a branch others have as well."""
        most = max((shared(lost.names, names) for names in running), default=0)
        for session in self._sessions.values():
            for each in session.branches:
                # One comparison for most of the thousands of branches: only those that share more are searched.
                if not each.is_abandoned and _shares(lost.names, each.names, most):
                    most = shared(lost.names, each.names)
        return most

    def _bound(self) -> None:
        """Forgets the sessions used longest ago; the last one stays, whatever its size."""
        while len(self._sessions) > 1 and (len(self._sessions) > SESSIONS_MAX or self._blocks > self._blocks_max):
            _, session = self._sessions.popitem(last=False)
            self._blocks -= sum(len(each.names) for each in session.branches)


def shared(one: Names, other: Names) -> int:
    """Returns how many leading names two chains share."""
    most = min(len(one), len(other))
    if not most or one[0] != other[0]:
        return 0
    return bisect_left(range(1, most), True, key=lambda at: one[at] != other[at]) + 1


def _shares(one: Names, other: Names, at: int) -> bool:
    """True if two chains share the block at this index, and with it all before."""
    return at < min(len(one), len(other)) and one[at] == other[at]


def _goes_on(old: Branch, new: Branch) -> bool:
    """True if a request goes on with a branch: it has all of its prompt. What was generated may be written anew."""
    return shared(old.names, new.names) >= old.prompt
