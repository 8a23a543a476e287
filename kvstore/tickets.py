"""Tickets: long-running operations of a worker as values, and the states that one passes through.

At the bottom, because both ends of the wire use them; kvstore/worker/control runs the operations.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType


class State(enum.Enum):
    """The state of a ticket."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """True if the state is final."""
        return not TRANSITIONS[self]


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.CANCELLED}),
    State.RUNNING: frozenset({State.DONE, State.FAILED, State.CANCELLED}),
    State.DONE: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}
"""The states that may follow each state."""

_NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Ticket:
    """A ticket at one moment. Times are wall times; 0 means not yet."""

    id: str
    act: str
    about: str
    identity: str
    """The identity that asked; empty if unknown."""
    tenant: str | None
    """The tenant whose chunks it is about; None: all tenants."""
    unit: str
    """The unit of ``done`` and ``total``."""
    began_s: float
    state: State = State.WAITING
    ended_s: float = 0.0
    done: int = 0
    total: int = 0
    """0 while it is not known."""
    message: str = ""
    """Why it failed, or what is worth knowing."""
    counts: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    """The results so far, by name."""
    worker: str = ""
    """The worker that has it, as a client reached it."""
    tokens: int = 0
    """Tokens of its prompts, which the worker keeps until it has ended."""

    def moved(self, state: State, *, message: str = "", ended_s: float = 0.0) -> Ticket:
        """The ticket in its next state, which must be one that may follow."""
        assert state in TRANSITIONS[self.state], f"a ticket that is {self.state.value} never becomes {state.value}"
        return replace(self, state=state, message=message, ended_s=ended_s)
