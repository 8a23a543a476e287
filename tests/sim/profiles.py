"""What a run is like: how many of everything, how bad the weather. A seed chooses a profile and then varies it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.sim.faults import Rates


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of run. Weights are relative; rates are per call, or per turn of the scheduler for ``mishaps``."""

    name: str
    nodes: int = 2
    workers: int = 2
    collectors: int = 2
    steps: int = 900
    shard_bits: int = 1
    prompts: int = 2
    chunks: int = 2
    objects: bool = False
    rates: Rates = field(default_factory=Rates)
    mishap: float = 0.004
    mishaps: dict[str, float] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)
    collect: dict[str, float] = field(default_factory=dict)
    victim: float = 0.8
    """How likely a chunk is chosen to be condemned."""
    dwell_long: float = 0.15
    """How likely a worker keeps a hold for long."""


WORK = {"put": 3.0, "hold": 4.0, "match": 1.0, "pin": 1.0, "unpin": 1.0, "put_blocks": 0.2, "get_blocks": 0.2}
COLLECT = {"sweep": 6.0, "adopt": 2.0, "lift": 0.7, "orphans": 0.3}
MISHAPS = {
    "kill": 1.0,
    "stop": 1.0,
    "leave": 0.2,
    "land": 4.0,
    "cut_watches": 1.0,
    "compact": 0.5,
    "expire": 0.5,
    "etcd_down": 0.3,
    "full": 0.3,
}
WEATHER = Rates(root_fails=0.002, meta_fails=0.006, linger=0.01, linger_hot=0.04, lag=0.3)
STORM = Rates(root_fails=0.01, meta_fails=0.03, linger=0.01, linger_hot=0.04, lag=0.5)
CALM = Rates(linger=0.01, linger_hot=0.04, lag=0.3)
SLOW = Rates(linger=0.03, linger_hot=0.08, lag=0.6)

PROFILES = (
    Profile("mixed", rates=WEATHER, mishaps=MISHAPS, work=WORK, collect=COLLECT),
    Profile("storm", rates=STORM, mishaps=MISHAPS, mishap=0.01, work=WORK, collect=COLLECT),
    Profile("calm", rates=CALM, mishaps={"cut_watches": 1.0, "stop": 1.0}, mishap=0.002, work=WORK, collect=COLLECT),
    Profile(
        "narrow", shard_bits=0, prompts=1, chunks=1, collectors=2, rates=SLOW, mishaps={"stop": 2.0, "kill": 0.5, "cut_watches": 1.0},
        mishap=0.003, victim=1.0, work={"put": 3.0, "hold": 5.0, "match": 1.0}, collect={"sweep": 6.0, "adopt": 1.0},
        dwell_long=0.05, steps=1500,
    ),
    Profile(
        "pinned", shard_bits=0, prompts=1, chunks=1, rates=SLOW, mishaps=MISHAPS, victim=1.0,
        work={"put": 4.0, "pin": 4.0, "unpin": 3.5}, collect={"sweep": 6.0, "adopt": 1.0}, steps=1500,
    ),
    Profile(
        "deposed", shard_bits=0, prompts=1, chunks=1, collectors=3, nodes=1, mishaps={"kill": 1.0, "stop": 3.0, "land": 1.0},
        mishap=0.004, rates=Rates(linger_hot=0.12, lag=0.1, lingers_steps=800), victim=1.0, work={"put": 4.0, "hold": 5.0},
        collect={"sweep": 5.0, "adopt": 4.0, "lift": 2.0}, steps=1500,
    ),
    Profile(
        "joining", rates=SLOW, mishaps={"kill": 1.0, "expire": 4.0, "leave": 0.3, "land": 1.0}, mishap=0.01, nodes=1,
        workers=3, work={"put": 3.0, "hold": 6.0, "pin": 1.0}, collect={"sweep": 6.0, "adopt": 1.0}, shard_bits=0, prompts=1,
        chunks=1, victim=1.0, dwell_long=0.4,
    ),
    Profile(
        "restored", rates=Rates(linger=0.01, linger_hot=0.1, lag=0.3, meta_fails=0.003), shard_bits=1, prompts=2, chunks=1,
        mishaps={"snapshot": 6.0, "restore": 4.0, "kill": 1.0, "stop": 1.0, "land": 1.0, "compact": 1.0}, mishap=0.01, victim=1.0,
        work={"put": 4.0, "hold": 5.0, "pin": 2.0, "unpin": 1.0}, collect={"sweep": 6.0, "adopt": 2.0, "lift": 0.3},
    ),
    Profile(
        "damaged", rates=SLOW, mishaps={"damage": 9.0, "kill": 1.0, "stop": 1.0, "land": 1.0}, mishap=0.03, workers=3,
        work={"put": 4.0, "hold": 6.0}, collect={"sweep": 1.0, "adopt": 1.0, "lift": 0.5, "orphans": 2.0}, shard_bits=0,
        prompts=1, chunks=1, collectors=1,
    ),
    Profile(
        "objects", objects=True, rates=WEATHER, mishaps={**MISHAPS, "stop": 3.0}, work=WORK, collect={"sweep": 6.0, "adopt": 3.0},
        shard_bits=0, prompts=1, chunks=1, collectors=3, victim=1.0, steps=1500,
    ),
)  # fmt: skip
BY_NAME = {profile.name: profile for profile in PROFILES}
