"""What goes wrong in one run, and how likely: the rates, and the dice that the ports throw."""

from __future__ import annotations

from dataclasses import dataclass

from tests.sim.kernel import Effect, Kernel


@dataclass(slots=True)
class Rates:
    """Probabilities of each single call; all 0 once the run is being wound up."""

    root_fails: float = 0.0
    meta_fails: float = 0.0
    linger: float = 0.0
    linger_hot: float = 0.0
    """The same before calls that take, publish or condemn."""
    lag: float = 0.0
    """That a watch has nothing yet of what has happened."""
    lingers_steps: int = 400


class Faults:
    """The dice, and what is still on its way. Shared by all ports of a run."""

    def __init__(self, kernel: Kernel, rates: Rates) -> None:
        self.kernel = kernel
        self.rates = rates
        self.late: list[Effect] = []
        self.meta_down_until_s = 0.0
        self.counts: dict[str, int] = {}

    def count(self, what: str, times: int = 1) -> None:
        """For the summary."""
        self.counts[what] = self.counts.get(what, 0) + times

    def strikes(self, rate: float) -> bool:
        """Throws a die."""
        return rate > 0 and self.kernel.random() < rate

    def maybe_linger(self, hot: bool) -> None:
        """Perhaps a long pause, longer ones being rarer."""
        rates = self.rates
        if self.strikes(rates.linger_hot if hot else rates.linger):
            self.count("lingers")
            self.kernel.linger(int(rates.lingers_steps ** self.kernel.random()) * 2)

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
