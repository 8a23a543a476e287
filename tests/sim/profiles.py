"""What a run is like: how many of everything, how bad the weather. A seed chooses a profile and then varies it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tests.sim.faults import WAITS, Call, Rates

WORK = {"put": 3.0, "hold": 4.0, "match": 1.0, "pin": 1.0, "unpin": 1.0, "put_blocks": 0.2, "get_blocks": 0.2}
COLLECT = {"sweep": 6.0, "adopt": 2.0, "lift": 0.7, "orphans": 0.3}


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
    work: dict[str, float] = field(default_factory=lambda: WORK)
    collect: dict[str, float] = field(default_factory=lambda: COLLECT)
    victim: float = 0.8
    """How likely a chunk is chosen to be condemned."""
    restores: float = 0.0
    """How likely etcd goes back, soon afterwards, to just before a sweep began or ended ..."""
    restore_steps: int = 150
    """... within so many steps."""
    hold_max_s: float = 40.0
    dwell_s: float = 10.0
    """The longest that a worker keeps a hold between two reads ..."""
    dwell_long: float = 0.15
    """... and how likely it keeps one so long; otherwise only for a moment."""


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
PAUSES = Rates(look=0.03, read=0.01, publish=0.1, take=0.3, settle=0.1, fence=0.1, txn=0.05, condemn=0.05, lag=0.4)
CALM = Rates(look=0.01, read=0.01, publish=0.04, take=0.1, settle=0.04, fence=0.04, txn=0.04, condemn=0.04, lag=0.3)
WEATHER = replace(CALM, root_fails=0.002, meta_fails=0.006, dies=0.002)
STORM = replace(CALM, root_fails=0.01, meta_fails=0.03, dies=0.004, lag=0.5)
NARROW = Profile("narrow", shard_bits=0, prompts=1, chunks=1, victim=1.0, steps=1500, rates=PAUSES)
"""One address, so that everybody meets there."""

PROFILES = (
    Profile("mixed", rates=WEATHER, mishaps=MISHAPS),
    Profile("storm", rates=STORM, mishaps=MISHAPS, mishap=0.01),
    Profile("calm", rates=CALM, mishaps={"cut_watches": 1.0, "stop": 1.0}, mishap=0.002),
    replace(
        NARROW,
        rates=replace(PAUSES, look=0.1, lag=0.6),
        mishap=0.003,
        dwell_long=0.05,
        mishaps={"stop": 2.0, "kill": 0.5, "cut_watches": 1.0},
        work={"put": 3.0, "hold": 5.0, "match": 1.0},
        collect={"sweep": 6.0, "adopt": 1.0},
    ),
    replace(
        NARROW,
        name="pinned",
        mishaps=MISHAPS,
        work={"put": 4.0, "pin": 4.0, "unpin": 3.5},
        collect={"sweep": 6.0, "adopt": 1.0},
    ),
    replace(
        NARROW,
        name="deposed",
        collectors=3,
        nodes=1,
        workers=4,
        mishap=0.003,
        dwell_long=0.1,
        mishaps={"kill": 1.0, "stop": 2.0, "land": 1.0},
        work={"put": 6.0, "hold": 5.0},
        rates=Rates(publish=0.5, take=0.5, settle=0.4, fence=0.25, condemn=0.15, dies=0.004, lag=0.1),
        collect={"sweep": 5.0, "adopt": 6.0, "lift": 1.0},
    ),
    replace(
        NARROW,
        name="hasty",
        mishap=0.001,
        mishaps={"stop": 1.0},
        work={"put": 1.5, "hold": 6.0},
        rates=replace(PAUSES, look=0.4, waits={**WAITS, Call.LOOK: ("condemned", "closed", "closed")}),
        collect={"sweep": 1.0},
        collectors=1,
        dwell_long=0.05,
    ),
    replace(
        NARROW,
        name="arriving",
        nodes=1,
        workers=3,
        collectors=1,
        mishap=0.005,
        dwell_long=0.5,
        dwell_s=60.0,
        hold_max_s=120.0,
        mishaps={"kill": 0.2, "expire": 3.0},
        work={"put": 3.0, "hold": 6.0},
        collect={"sweep": 1.0},
        rates=replace(
            PAUSES, txn=0.4, take=1.0, lag=0.8, waits={**WAITS, Call.TXN: ("take",), Call.TAKE: ("claimed",)}
        ),
    ),
    replace(
        NARROW,
        name="joining",
        nodes=1,
        workers=3,
        mishap=0.01,
        dwell_long=0.3,
        rates=replace(PAUSES, txn=0.15, take=0.5, lag=0.6),
        work={"put": 3.0, "hold": 6.0, "pin": 1.0},
        mishaps={"kill": 1.0, "expire": 2.0, "leave": 0.5, "land": 0.5},
        collect={"sweep": 6.0, "adopt": 1.0},
    ),
    Profile(
        "restored",
        prompts=3,
        chunks=1,
        mishap=0.006,
        victim=0.6,
        restores=0.2,
        steps=1200,
        dwell_long=0.3,
        rates=replace(PAUSES, take=0.5, meta_fails=0.003, pause_steps=800),
        mishaps={"snapshot": 4.0, "restore": 2.0, "kill": 2.0, "stop": 1.0, "land": 1.0, "compact": 1.0},
        work={"put": 4.0, "hold": 6.0, "pin": 1.0, "unpin": 1.0},
        collect={"sweep": 6.0, "adopt": 2.0, "lift": 0.3},
    ),
    Profile(
        "relapsed",
        prompts=3,
        chunks=1,
        nodes=1,
        workers=4,
        collectors=3,
        mishap=0.002,
        victim=0.6,
        restores=0.4,
        restore_steps=800,
        steps=1200,
        dwell_long=0.3,
        mishaps={"kill": 1.0, "stop": 1.0, "compact": 1.0},
        rates=replace(PAUSES, take=0.9, waits={**WAITS, Call.TAKE: ("", "claimed", "claimed", "claimed")}),
        work={"put": 4.0, "hold": 6.0, "pin": 1.0, "unpin": 0.5},
        collect={"sweep": 6.0, "adopt": 2.0, "lift": 1.0},
    ),
    Profile(
        "forked",
        prompts=4,
        chunks=1,
        nodes=1,
        workers=4,
        collectors=3,
        mishap=0.001,
        victim=0.5,
        restores=0.4,
        restore_steps=80,
        steps=1200,
        dwell_long=0.4,
        mishaps={"compact": 1.0},
        rates=replace(PAUSES, take=0.9, condemn=0.4, lag=0.5, waits={**WAITS, Call.TAKE: ("", "claimed", "claimed")}),
        work={"put": 4.0, "hold": 6.0},
        collect={"sweep": 6.0, "adopt": 1.0},
    ),
    replace(
        NARROW,
        name="damaged",
        mishap=0.03,
        workers=3,
        collectors=1,
        work={"put": 4.0, "hold": 6.0},
        mishaps={"damage": 9.0, "kill": 1.0, "stop": 1.0, "land": 1.0},
        collect={"sweep": 1.0, "adopt": 1.0, "lift": 0.5, "orphans": 2.0},
    ),
    replace(
        NARROW,
        name="objects",
        objects=True,
        collectors=3,
        mishaps={**MISHAPS, "stop": 3.0},
        rates=replace(PAUSES, take=0.5, condemn=0.15, root_fails=0.001, meta_fails=0.003),
        work={"put": 4.0, "hold": 4.0, "pin": 4.0, "unpin": 4.0},
        collect={"sweep": 6.0, "adopt": 6.0},
    ),
)
BY_NAME = {profile.name: profile for profile in PROFILES}
