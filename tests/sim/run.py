"""One seed, from start to verdict; and many, over several processes of the machine."""

from __future__ import annotations

import gc
import logging
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

from tests.sim.capacity_world import CapacityWorld
from tests.sim.folder_world import FolderWorld
from tests.sim.kernel import Kernel
from tests.sim.profiles import BY_NAME, ROTATION, Profile
from tests.sim.threads import installed
from tests.sim.world import World

STAYS = (0.0, 0.4, 0.7, 0.9)
"""How likely an actor goes on where others could run: from any interleaving to long runs of one."""
RANKED = 0.2
"""How many of the seeds go by ranks with a few changes instead of a random walk."""
BATCH = 25
"""Seeds that a worker process does at once."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one seed. ``digest`` is that of its trace: two runs with equal digests were the same run."""

    seed: int
    profile: str
    violation: str | None
    steps: int
    digest: int
    counts: Counter[str] = field(default_factory=Counter)
    log: tuple[str, ...] = ()


def run(seed: int, *, profile: Profile | None = None, trace: bool = False) -> Outcome:
    """Runs one seed, in a profile that it chooses unless told."""
    first = random.Random(seed)
    chosen = profile or ROTATION[seed % len(ROTATION)]
    stay, is_ranked = first.choice(STAYS), first.random() < RANKED
    demotions = sorted((first.randrange(chosen.steps) for _ in range(first.randrange(2, 12))), reverse=True)
    kernel = Kernel(seed, stay=stay, demotions=demotions if is_ranked else (), trace=trace)
    logging.disable(logging.CRITICAL)
    try:
        with installed(kernel):
            world = _world_of(chosen)(kernel, chosen)
            try:
                world.run()
            finally:
                kernel.end()
                world.close()
    finally:
        logging.disable(logging.NOTSET)
    kernel.note(f"ended {kernel.random()}")
    return Outcome(
        seed, world.profile.name, kernel.violation, kernel.steps, kernel.digest, world.counts, tuple(kernel.log or ())
    )


def _world_of(profile: Profile) -> type[World] | type[FolderWorld]:
    if profile.one_host:
        return FolderWorld
    return CapacityWorld if profile.capacity_chunks else World


def run_many(seeds: Sequence[int], workers: int, profile: str | None = None) -> Iterator[Outcome]:
    """Runs seeds in several processes; in order, so that the output is the same each time."""
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    # A process is dropped when it dies, as SIGKILL would, and what its frames held stays: so workers are changed often.
    with get_context("spawn").Pool(workers, maxtasksperchild=4) as pool:
        for outcomes in pool.imap(partial(_run_batch, profile), batches):
            yield from outcomes


def first_to_find(seeds: Sequence[int], profile: Profile | None = None) -> Outcome | None:
    """The outcome of the first seed with a violation."""
    for seed in seeds:
        outcome = run(seed, profile=profile)
        if outcome.violation is not None:
            return outcome
    return None


def _run_batch(profile: str | None, seeds: Sequence[int]) -> list[Outcome]:
    gc.freeze()
    return [run(seed, profile=BY_NAME[profile] if profile else None) for seed in seeds]
