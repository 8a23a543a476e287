"""Every interleaving, breadth first: so the first counterexample is a shortest one."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.model import collectors, etcd, nodes, quarantine
from tests.model.configs import Config, Dropped
from tests.model.etcd import Step
from tests.model.state import State, Violation
from tests.model.world import broken_invariant, canonical, initial

STATES_MAX = 12_000_000

Parents = dict[State, State | None]


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search. ``invariant`` is None if all hold; ``trace`` leads to the state in which one does not."""

    reached: Parents
    invariant: str | None
    why: str
    trace: tuple[str, ...]


def steps(s: State, k: Config, dropped: Dropped) -> Iterator[Step]:
    """Whatever may happen next, to whomever."""
    yield from quarantine.publishing_steps(s, k, dropped)
    yield from etcd.steps(s, k, dropped)
    yield from nodes.steps(s, k, dropped)
    yield from collectors.steps(s, k, dropped)
    if k.menders or k.restorers:
        yield from quarantine.steps(s, k, dropped)


def search(k: Config, dropped: Dropped = frozenset()) -> Found:
    """All states that can be reached, up to the first that breaks an invariant."""
    with no_cycles():
        return _search(k, dropped)


@contextmanager
def no_cycles() -> Iterator[None]:
    """States are tuples in tuples: looking for cycles among millions of them takes as long as the search itself."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _search(k: Config, dropped: Dropped) -> Found:
    first = canonical(initial(k))
    parents: Parents = {first: None}
    queue = deque([first])

    def found(invariant: str | None, why: str, trace: list[str]) -> Found:
        return Found(parents, invariant, why, tuple(trace))

    while queue:
        s = queue.popleft()
        try:
            for _, after in steps(s, k, dropped):
                after = canonical(after)
                if after in parents:
                    continue
                parents[after] = s
                if broken := broken_invariant(after, k):
                    return found(*broken, trace(parents, after, k, dropped))
                queue.append(after)
        except Violation as violation:
            return found(violation.invariant, str(violation), [*trace(parents, s, k, dropped), violation.label])
        assert len(parents) <= STATES_MAX, f"more than {STATES_MAX} states: choose smaller bounds"
    return found(None, "", [])


def trace(parents: Parents, s: State, k: Config, dropped: Dropped) -> list[str]:
    """The steps that led to a state. They are not kept: the search would take twice the memory."""
    labels: list[str] = []
    while (before := parents[s]) is not None:
        labels.append(_label(before, s, k, dropped))
        s = before
    return labels[::-1]


def _label(before: State, after: State, k: Config, dropped: Dropped) -> str:
    try:
        for label, state in steps(before, k, dropped):
            if canonical(state) == after:
                return label
    except Violation:
        pass
    raise AssertionError("a state follows from the one before it")
