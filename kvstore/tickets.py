"""Tickets: long acts of a worker as values, and which state of one follows which.

At the bottom, because both ends of the wire have them; what does them is in kvstore/worker/control.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType


class State(enum.Enum):
    """How a ticket is."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether it stays so."""
        return not TRANSITIONS[self]


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.CANCELLED}),
    State.RUNNING: frozenset({State.DONE, State.FAILED, State.CANCELLED}),
    State.DONE: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}
"""Which state may follow which."""

_NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Ticket:
    """One of them, at one moment. Times are wall times, 0 while they are not there yet."""

    id: str
    act: str
    about: str
    identity: str
    """Who asked; empty where nobody is known."""
    tenant: str | None
    """Whose chunks it is about; None: those of all tenants."""
    unit: str
    """What ``done`` and ``total`` count."""
    began_s: float
    state: State = State.WAITING
    ended_s: float = 0.0
    done: int = 0
    total: int = 0
    """0 while it is not known."""
    message: str = ""
    """Why it failed, or what is worth knowing."""
    counts: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    """What came of it so far."""
    worker: str = ""
    """The worker that has it, as a client reached it."""
    tokens: int = 0
    """Of its prompts, which the worker keeps until it has ended."""

    def moved(self, state: State, *, message: str = "", ended_s: float = 0.0) -> Ticket:
        """The same in its next state, which must be one that may follow."""
        assert state in TRANSITIONS[self.state], f"a ticket that is {self.state.value} never becomes {state.value}"
        return replace(self, state=state, message=message, ended_s=ended_s)
