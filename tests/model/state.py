"""The whole world as one value: root, etcd, nodes, collectors; and what must hold in it (I1 to I4).

Named tuples of numbers, because the search makes and hashes millions of them.  Addresses are 0 and 1 (A and B), each in
a shard of its own; everything that there is per address is a tuple with one part for each.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

T = TypeVar("T")

# What a node is: not there yet, its session's key is put, it lifts the fences it found (C4), it serves, it is over.
OUT, JOINING, FENCING, UP, DEAD = range(5)
LIVE = (JOINING, FENCING, UP)

# How far a hold is: none, taken, the file was seen; and in a mutation, the file was seen before the hold was taken.
NOT_HELD, TAKEN, SEEN, SEEN_EARLY = range(4)
NEVER = 99
BEFORE_ALL = -1

# Which of a node's two chains no longer continues what etcd has: its session's key (C2), the chain of sweeps (C1).
KEY_CHAIN, SEQ_CHAIN = 1, 2

# How far a look is that may be remembered (H3).
NO_LOOK, LOOKING, FOUND = range(3)


class Hold(NamedTuple):
    """``born`` is a revision, ``inc`` the incarnation that was seen under it."""

    stage: int
    born: int
    inc: int


NO_HOLD = Hold(NOT_HELD, 0, 0)


class Node(NamedTuple):
    """One node, or one session of it: a dead one never comes back (V2)."""

    status: int
    seen_rev: int  # the view: the last revision applied, and for each address the stamp that condemns it, or 0
    seen: tuple[int, ...]
    lag: int  # events of the watch that are not applied yet
    holds: tuple[Hold, ...]
    cache: tuple[int, ...]
    looks: tuple[int, ...]
    announced: int
    named: tuple[int, ...]  # the held addresses that its record names: collectors spare them (A2)
    ref: int  # the pin of A in etcd: 0 or its id; negative where the node believes in it and etcd does not have it
    pinned: int  # the incarnation that was there under the pin: only for the invariant
    pinning: int  # the put of a pin is in flight
    unpinning: int  # the removal of the pin with this id is in flight
    written: int  # the session's key was written since the snapshot of etcd
    broken: int


class Condemned(NamedTuple):
    """The key ``gc/condemned/<shard>``. ``listed`` is 0 once nothing is to be taken; ``final`` fixes the list (O1)."""

    sweep: int
    inc: int
    stamp: int
    listed: int
    final: int


class Event(NamedTuple):
    """An event of a watch on ``gc/``: its revision, and the stamps that condemn each address after it, or 0."""

    rev: int
    condemned: tuple[int, ...]


class Sweep(NamedTuple):
    """One sweep in a collector's memory. ``inc`` is UNKNOWN if it only lifts the fence; ``spared`` if G4 spares it."""

    shard: int
    id: int
    inc: int
    stamp: int
    spared: int = 0


UNKNOWN = -1


class Run(NamedTuple):
    """One collector; one that never moves again has crashed, one that moves late was deposed.

    It works on its sweeps one after the other, ``at`` is the current one, and closes them together.
    """

    pc: int
    sweeps: tuple[Sweep, ...]
    at: int
    memo: tuple[int, ...]  # its memory from one step to the next


class Entry(NamedTuple):
    """``trash/<sweep>/<address>.<run>``."""

    sweep: int
    run: int
    inc: int


class Set(NamedTuple):
    """``quarantine/<address>.<session>.<number>``, with a name that is used once."""

    name: int
    inc: int


class Mender(NamedTuple):
    """Somebody who sets a damaged file aside, or puts whole ones back."""

    pc: int
    taken: Set | None


class Snapshot(NamedTuple):
    """etcd as it will come back. ``events_count`` were written since and will be lost."""

    condemned: tuple[Condemned | None, ...]
    rev: int
    sessions: tuple[tuple[bool, int, tuple[int, ...], int], ...]  # known, announced, named, ref
    events_count: int


NO_ROLLBACK, NOT_TAKEN, RESTORED = range(3)


class State(NamedTuple):
    """Everything. The first six are the root, the next four etcd."""

    files: tuple[int, ...]  # P(address): 0 or an incarnation
    next_inc: tuple[int, ...]
    trash: frozenset[Entry]
    folders: frozenset[int]
    damaged: frozenset[int]
    quarantine: frozenset[Set]
    condemned: tuple[Condemned | None, ...]
    rev: int  # the events under ``gc/`` that began a sweep
    log: tuple[Event, ...]  # those that some node has not applied
    snapshot: Snapshot | int
    nodes: tuple[Node, ...]
    runs: tuple[Run, ...]
    menders: tuple[Mender, ...]
    sweeps_count: int


class Violation(Exception):
    """A step broke an invariant: ``invariant`` is I1 to I4."""

    def __init__(self, invariant: str, why: str, label: str) -> None:
        super().__init__(f"{invariant}: {why}")
        self.invariant = invariant
        self.label = label


INCS_PER_ADDRESS = 10


def address_of(inc: int) -> int:
    """Returns the address that an incarnation publishes."""
    return inc // INCS_PER_ADDRESS


def put(parts: tuple[T, ...], at: int, part: T) -> tuple[T, ...]:
    """A copy of the tuple with another part at one place."""
    return (*parts[:at], part, *parts[at + 1 :])
