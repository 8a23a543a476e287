"""One seed, from start to verdict; and many, over several processes of the machine."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from tests.sim.kernel import Kernel
from tests.sim.profiles import PROFILES, Profile
from tests.sim.threads import installed
from tests.sim.world import World

STAYS = (0.0, 0.4, 0.7, 0.9)
"""How likely an actor goes on where others could run: from any interleaving to long runs of one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one seed."""

    seed: int
    profile: str
    violation: str | None
    steps: int
    digest: int
    counts: Counter[str] = field(default_factory=Counter)
    log: tuple[str, ...] = ()


def run(
    seed: int,
    *,
    profile: Profile | None = None,
    bug: Callable[[], AbstractContextManager[object]] = nullcontext,
    trace: bool = False,
) -> Outcome:
    """Runs one seed, in a profile that it chooses unless told; ``bug`` breaks the code meanwhile."""
    logging.disable(logging.CRITICAL)
    first = random.Random(seed)
    profile = profile or first.choice(PROFILES)
    kernel = Kernel(seed, stay=first.choice(STAYS), trace=trace)
    try:
        with installed(kernel), bug():
            try:
                world = World(kernel, profile)
                world.run()
            finally:
                kernel.end()
    finally:
        logging.disable(logging.NOTSET)
    counts = Counter(world.faults.counts) + world.oracle.counts
    return Outcome(seed, profile.name, kernel.violation, kernel.steps, kernel.digest, counts, tuple(kernel.log or ()))
