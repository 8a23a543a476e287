"""What goes wrong in one run, and how likely: the rates, and the dice that the ports throw.

A pause is what breaks protocols, and at random steps it hardly ever lasts from one interesting moment to the next.  So
an actor may also stand still until something happens that rules are about: another one takes a chunk, closes a sweep,
publishes, hands out a hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from tests.sim.kernel import Effect, Kernel, Process


class Call(Enum):
    """A call at which an actor may stand still: after a look, before the others."""

    LOOK = "look"
    READ = "read"
    """Of a file, under a hold, or of the metadata: who stands still there keeps sweeps from going on."""
    PUBLISH = "publish"
    TAKE = "take"
    """A collector takes a chunk."""
    SETTLE = "settle"
    """It has taken one, and deletes it or puts it back."""
    FENCE = "fence"
    TXN = "txn"
    CONDEMN = "condemn"
    """A transaction that begins or ends a sweep."""
    OTHER = "other"


WAITS: dict[Call, tuple[str, ...]] = {
    Call.LOOK: ("", "condemned", "take", "closed"),
    Call.READ: ("", "condemned", "take", "closed"),
    Call.PUBLISH: ("", "condemned", "take", "taken", "closed"),
    Call.TAKE: ("", "published", "claimed", "claimed", "claimed"),
    Call.SETTLE: ("", "published", "published", "taken", "taken"),
    Call.FENCE: ("", "condemned", "taken", "claimed", "closed"),
    Call.TXN: ("", "condemned", "take", "taken", "closed"),
    Call.CONDEMN: ("", "condemned", "taken", "closed"),
}
"""What an actor may wait for at each; the empty one is only a number of steps."""
AWAIT_STEPS = {Call.LOOK: 400, Call.TAKE: 250, Call.TXN: 250}
AWAIT_STEPS_DEFAULT = 150
"""No longer, because often that is not going to happen."""


@dataclass(slots=True)
class Rates:
    """Probabilities of each single call; all 0 once the run is being wound up."""

    root_fails: float = 0.0
    meta_fails: float = 0.0
    look: float = 0.0
    """That a node stands still after a look whether a chunk is there ..."""
    read: float = 0.0
    """... or after reading anything else."""
    publish: float = 0.0
    """That anybody does before a chunk is published ..."""
    take: float = 0.0
    """... taken,"""
    settle: float = 0.0
    fence: float = 0.0
    txn: float = 0.0
    condemn: float = 0.0
    dies: float = 0.0
    """That a process is killed before one of the last six."""
    lag: float = 0.0
    """That a watch has nothing yet of what has happened."""
    pause_steps: int = 400
    """The longest pause is twice as long."""
    waits: dict[Call, tuple[str, ...]] = field(default_factory=lambda: WAITS)


class Faults:
    """The dice, and what is still on its way. Shared by all ports of a run."""

    def __init__(self, kernel: Kernel, rates: Rates) -> None:
        self.kernel = kernel
        self.rates = rates
        self.late: list[Effect] = []
        self.doomed: list[Process] = []
        self.before_txn: Callable[[str], object] = lambda keys: None
        self.before_take: Callable[[], object] = lambda: None
        self.meta_down_until_s = 0.0
        self.counts: dict[str, int] = {}

    def count(self, what: str, times: int = 1) -> None:
        """For the summary."""
        self.counts[what] = self.counts.get(what, 0) + times

    def strikes(self, rate: float) -> bool:
        """Throws a die."""
        return rate > 0 and self.kernel.random() < rate

    def maybe_pause(self, call: Call) -> None:
        """Perhaps the actor stands still here, perhaps its process dies."""
        if call is Call.OTHER:
            return
        rates, actor = self.rates, self.kernel.current
        assert actor is not None
        if call is Call.TAKE:
            self.kernel.happened("take")
            self.before_take()
        if call not in (Call.LOOK, Call.READ) and self.strikes(rates.dies):
            self.doomed.append(actor.process)
            self.kernel.give_way()
        rate: float = getattr(rates, call.value)
        if call in (Call.LOOK, Call.READ) and actor.process.is_collector:
            rate /= 5  # they look all the time
        if self.strikes(rate):
            self._pause(call)

    def _pause(self, call: Call) -> None:
        """For some steps, short pauses being the most frequent, or until something happens."""
        kernel = self.kernel
        what = kernel.source.choice(self.rates.waits[call])
        steps = int(self.rates.pause_steps ** kernel.random()) * 2
        if what:
            self.count(f"pauses until {what}")
            kernel.pause(AWAIT_STEPS.get(call, AWAIT_STEPS_DEFAULT), (what, steps // 10))
        else:
            self.count("pauses")
            kernel.pause(steps)

    def land(self, index: int) -> None:
        """One call that nobody waits for any more takes effect."""
        effect = self.late.pop(index)
        try:
            effect()
        except Exception as refused:  # noqa: BLE001 - nobody hears of it
            self.kernel.note(f"late, refused: {refused}")
        else:
            self.kernel.note("late, landed")
            self.count("late effects landed")
