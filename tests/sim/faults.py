"""The faults of one run and their rates, and the dice that the ports throw.

A pause is what breaks protocols, and at random steps it hardly ever lasts from one interesting moment to the next. So
an actor may also stand still until an event that rules are about: another actor takes a chunk, closes a sweep,
publishes, or returns a hold.
"""

from __future__ import annotations

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
    """A collector takes a chunk, the first since a sweep was condemned ..."""
    RETAKE = "retake"
    """... or another one."""
    SETTLE = "settle"
    """It has taken one, and deletes it or puts it back."""
    FENCE = "fence"
    TXN = "txn"
    CONDEMN = "condemn"
    """A transaction that begins a sweep ..."""
    CLOSE = "close"
    """... or ends one."""
    ANNOUNCE = "announce"
    """A node announces."""
    LINK = "link"
    """A collector has looked at the sweeps in flight, and is about to read the end of their chain."""
    OTHER = "other"


WAITS: dict[Call, tuple[str, ...]] = {
    Call.LOOK: ("", "condemned", "take", "closed"),
    Call.READ: ("", "condemned", "take", "closed"),
    Call.PUBLISH: ("", "condemned", "take", "taken", "closed"),
    Call.TAKE: ("", "published", "claimed", "claimed", "claimed"),
    Call.RETAKE: ("", "published", "claimed", "claimed", "claimed"),
    Call.SETTLE: ("", "published", "published", "taken", "taken"),
    Call.FENCE: ("", "condemned", "taken", "claimed", "closed"),
    Call.TXN: ("", "condemned", "take", "taken", "closed"),
    Call.CONDEMN: ("", "condemned", "taken", "closed"),
    Call.CLOSE: ("", "condemned", "taken", "closed"),
    Call.ANNOUNCE: ("", "condemned", "take", "taken", "closed"),
    Call.LINK: ("", "condemned", "closed"),
}
"""What an actor may wait for at each, one thing after the other; the empty one is only a number of steps."""
AWAIT_STEPS = {Call.LOOK: 400, Call.TAKE: 250, Call.TXN: 250}
AWAIT_STEPS_DEFAULT = 150
"""No longer, because often that is not going to happen."""
AS = {Call.RETAKE: "take", Call.CLOSE: "condemn", Call.ANNOUNCE: "txn"}
PATIENCE_S = (1.0, 4.0, 60.0)
"""No longer either while everybody else only waits: or time would pass in which nothing happens."""


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
    retake: float | None = None
    """As ``take`` where None."""
    settle: float = 0.0
    fence: float = 0.0
    txn: float = 0.0
    condemn: float = 0.0
    close: float | None = None
    """As ``condemn`` where None."""
    announce: float | None = None
    """As ``txn`` where None."""
    link: float = 0.0
    dies: float = 0.0
    """That a process is killed before one of the others than ``look`` and ``read``."""
    lag: float = 0.0
    """That a watch has nothing yet of what has happened."""
    pause_steps: int = 400
    """The longest pause is twice as long."""
    await_steps: int = 0
    """How long to wait for something at most, where it is not AWAIT_STEPS."""
    waits: dict[Call, tuple[str, ...]] = field(default_factory=lambda: WAITS)


class Faults:
    """The dice, and calls that take effect later. Shared by all ports of a run."""

    def __init__(self, kernel: Kernel, rates: Rates) -> None:
        self.kernel = kernel
        self.rates = rates
        self.late: list[Effect] = []
        self.doomed: list[Process] = []
        self.meta_down_until_s = 0.0
        self._awaited: set[tuple[Call, str]] = set()
        self.takes = 0
        """Since a sweep was condemned."""
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
            self.takes += 1
            call = Call.RETAKE if self.takes > 1 else call
        if call not in (Call.LOOK, Call.READ) and self.strikes(rates.dies):
            self.doomed.append(actor.process)
            self.kernel.give_way()
        found: float | None = getattr(rates, call.value)
        rate: float = getattr(rates, AS[call]) if found is None else found
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
            # Never two at one place for one thing: where one waits, others must make it happen.
            if (call, what) in self._awaited:
                return
            self._awaited.add((call, what))
            self.count(f"pauses until {what}")
            kernel.note(f"stands still at {call.value} until {what}")
            most = self.rates.await_steps or AWAIT_STEPS.get(call, AWAIT_STEPS_DEFAULT)
            try:
                kernel.pause(most, (what.split(">"), steps // 10), kernel.source.choice(PATIENCE_S))
            finally:
                self._awaited.discard((call, what))
        else:
            self.count("pauses")
            kernel.pause(steps, None, kernel.source.choice(PATIENCE_S))

    def land(self, index: int) -> None:
        """Makes one call take effect that nobody waits for any more."""
        effect = self.late.pop(index)
        try:
            effect()
        except Exception as refused:  # noqa: BLE001 - nobody hears of it
            self.kernel.note(f"late, refused: {refused}")
        else:
            self.kernel.note("late, landed")
            self.count("late effects landed")
