"""One world or mutation, searched and compared with what is expected of it; with liveness (I5).

I5: whatever happened, garbage collection can still come to an end. From every state that was reached: the collectors of
that state never move again, fresh ones come, nothing more is published. Then a fixed schedule of helpful steps empties
trash, quarantine and ``gc/condemned/``, and deletes what no pin has; also where a hold is never released, but for what
it holds. That is reachability, not fairness.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tests.model.collectors import DONE, FINISHED
from tests.model.configs import CONFIGS, Config, Dropped
from tests.model.etcd import Step
from tests.model.mutations import MUTATIONS
from tests.model.quarantine import ENDED
from tests.model.search import Found, no_cycles, search, steps
from tests.model.state import DEAD, Mender, Run, State
from tests.model.world import NEW, canonical

FRESH_COUNT = 6
STEPS_MAX = 250

HELPFUL = (
    *("list", "serve", "fence_", "watch_event", "give_up", "pin_put", "release", "stat", "chain", "unpin"),
    *("late_unpin", "announce", "lost_watch_and_session"),
)
"""What nodes do that cooperate: they finish what they began, and announce what a sweep waits for."""
KEEPING = tuple(step for step in HELPFUL if step not in ("release", "unpin", "late_unpin"))
"""Nodes that never give back what they hold or have pinned: that stays, and no sweep waits for them."""
STUCK = ("lease_dies",)
"""Nodes that do nothing, until their leases end."""


def stuck_state(reached: Iterable[State], k: Config, helpful: tuple[str, ...], dropped: Dropped) -> State | None:
    """Returns a state in which collection cannot end; None if there is none."""
    larger = replace(k, sweeps=k.sweeps + k.shards + k.menders)
    good: set[State] = set()
    with no_cycles():
        for s in reached:
            path: list[State] = []
            s = _with_fresh_collectors(s, k)
            while s not in good and not _is_quiet(s, helpful):
                path.append(s)
                if any(n.ref and n.status == DEAD for n in s.nodes):
                    break  # a persistent pin rightly protects for ever
                after = _next(s, larger, helpful, dropped)
                if after is None or len(path) > STEPS_MAX:
                    return s
                s = canonical(after)
            good.update(path)
    return None


def _with_fresh_collectors(s: State, k: Config) -> State:
    runs = (FINISHED,) * len(s.runs) + (Run(NEW, (), 0, ()),) * FRESH_COUNT
    menders = (Mender(ENDED, None),) * k.menders + (Mender(NEW, None),) * k.restorers
    return s._replace(runs=runs, menders=menders)


def _is_quiet(s: State, helpful: tuple[str, ...]) -> bool:
    files = helpful != KEEPING and any(s.files)
    return not (files or s.trash or s.folders or s.quarantine or any(s.condemned))


def _next(s: State, k: Config, helpful: tuple[str, ...], dropped: Dropped) -> State | None:
    """The next step of the schedule: who mends, then nodes, then a run at work, then a new one; planning comes last."""
    is_busy = any(run.pc not in (NEW, DONE) for run in s.runs)
    best: tuple[int, State] | None = None
    for step in steps(s, k, dropped):
        rank = _rank(step, helpful, is_busy)
        if rank is not None and (best is None or rank < best[0]):
            best = rank, step[1]
    return None if best is None else best[1]


def _rank(step: Step, helpful: tuple[str, ...], is_busy: bool) -> int | None:
    actor, _, what = step[0].partition(".")
    if actor[0] == "m":
        return 0
    if actor[0] == "n" and what.startswith(helpful) and what != "unpin_timeout":
        return 1
    if (
        actor[0] != "g"
        or what.startswith("abandon")
        or (is_busy and what.startswith(("adopt", "fence_unlisted", "plan")))
    ):
        return None
    return 3 if what.startswith("plan") else 2


EXPECTED = {mutation.name: mutation.invariant for mutation in MUTATIONS}
LIVENESS = {"nodes cooperate": HELPFUL, "nodes keep what they hold": KEEPING, "only leases end": STUCK}


@dataclass(frozen=True, slots=True)
class Checked:
    """``broken`` is the invariant that does not hold, None where all do; ``trace`` is a shortest way there."""

    name: str
    states_count: int
    seconds: float
    broken: str | None
    expected: str | None
    why: str
    trace: tuple[str, ...]

    @property
    def is_expected(self) -> bool:
        """True if the verdict is the right one."""
        return self.broken == self.expected


def check(name: str) -> Checked:
    """Searches ``config`` or ``config/mutation``; also checks liveness if no mutation or I5 is expected to break."""
    began_s = time.perf_counter()
    config, _, dropped = name.partition("/")
    rules = frozenset(dropped.split("+")) if dropped else frozenset()
    expected = EXPECTED.get(name)
    found = search(CONFIGS[config], rules)
    broken, why = found.invariant, found.why
    if broken is None and (not dropped or expected == "I5") and not CONFIGS[config].replaces:
        broken, why = _liveness(found, config, rules)
    return Checked(name, len(found.reached), time.perf_counter() - began_s, broken, expected, why, found.trace)


def _liveness(found: Found, config: str, rules: Dropped) -> tuple[str | None, str]:
    for case, helpful in LIVENESS.items():
        stuck = stuck_state(found.reached, CONFIGS[config], helpful, rules)
        if stuck is not None:
            return "I5", f"nothing helps any more, where {case}: {stuck}"
    return None, ""
