"""Profiles of a run: the number of everything, and the rates of faults. A seed chooses a profile and varies it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tests.sim.faults import WAITS, Call, Rates

WORK = {"put": 3.0, "hold": 4.0, "match": 1.0, "pin": 1.0, "unpin": 1.0, "put_blocks": 0.2, "get_blocks": 0.2}
COLLECT = {"sweep": 6.0, "adopt": 2.0, "lift": 0.7, "orphans": 0.3}


@dataclass(frozen=True, slots=True)
class Relapse:
    """When etcd goes back, and to when: aimed at the moments whose effects on the root stay."""

    likely: float
    """Of each of the moments to which it may go back, that it will ..."""
    to: tuple[str, ...] = ("now condemning", "now closing")
    """... which are just before a transaction for one of these ..."""
    at: tuple[str, ...] = ("take",)
    """... when one of these has happened, whichever is drawn, or several one after the other ..."""
    steps: int = 0
    """... or up to so many later."""
    times: int = 1
    """In one run."""
    cut: float = 0.5
    """How likely watches are lost ..."""
    bump: float = 0.3
    """... and the new history begins far behind the lost one, as with etcdctl's --bump-revision --mark-compacted."""
    spoils: float = 0.0
    """How likely the twins of pins that are lost cannot be read any more, until the end."""


@dataclass(frozen=True, slots=True)
class Ambush:
    """A collector waits for a moment, and then does something at once."""

    likely: float
    upon: str
    then: str
    steps: int = 40
    """It does so at most so many steps later."""


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
    relapse: Relapse = field(default_factory=lambda: Relapse(0.0))
    cuts: float = 0.0
    """How likely all watches are lost at the moment at which a sweep begins or ends."""
    ambushes: tuple[Ambush, ...] = ()
    stall_s: float = 10.0
    """After so long a thread of a node counts as hanging."""
    share: float = 0.7
    """How likely a sweep takes each shard."""
    stops: float = 0.0
    """How likely a collector that waits for nodes is told to end, and abandons its sweeps."""
    swarms: bool = False
    """True if each run leaves out some of its mishaps and kinds of work, so that more of the others happens."""
    one_host: bool = False
    """True if the processes of one host share a folder without etcd (``folder_world``)."""
    capacity_chunks: int = 0
    """The chunks that fill the root, with collectors that evict (``capacity_world``); 0: with random sweeps."""
    strangers: int = 0
    """Nodes that are on another cluster's etcd by mistake (rule C6)."""
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
    Profile("mixed", rates=WEATHER, mishaps=MISHAPS, swarms=True),
    Profile("storm", rates=STORM, mishaps=MISHAPS, mishap=0.01, strangers=1, swarms=True),
    Profile("calm", rates=CALM, mishaps={"cut_watches": 1.0, "stop": 1.0}, mishap=0.002, strangers=1),
    replace(
        NARROW,
        rates=replace(PAUSES, look=0.1, take=0.6, lag=0.8),
        mishap=0.003,
        dwell_long=0.1,
        mishaps={"stop": 2.0, "kill": 0.5, "cut_watches": 1.0, "garble": 1.0},
        work={"put": 3.0, "hold": 5.0, "match": 1.0},
        collect={"sweep": 6.0, "adopt": 1.0},
    ),
    replace(
        NARROW,
        name="pinned",
        mishaps=MISHAPS,
        rates=replace(PAUSES, txn=0.4, meta_fails=0.05, waits={**WAITS, Call.TXN: ("condemned", "take")}),
        work={"put": 5.0, "pin": 4.0, "unpin": 3.5},
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
        stops=0.25,
        ambushes=(Ambush(0.5, "condemned", "adopt"),),
        mishaps={"kill": 1.0, "stop": 2.0, "land": 1.0},
        work={"put": 6.0, "hold": 5.0},
        rates=Rates(
            publish=0.5,
            take=0.8,
            retake=0.3,
            settle=0.4,
            fence=0.5,
            condemn=0.05,
            close=0.4,
            dies=0.004,
            lag=0.1,
            await_steps=500,
            waits={
                **WAITS,
                Call.PUBLISH: ("condemned", "taken", "closed"),
                Call.TAKE: ("published", "closed>claimed", "closed>claimed"),
                Call.FENCE: ("claimed", "taken"),
                Call.CLOSE: ("closed>condemned>take",),
            },
        ),
        collect={"sweep": 6.0, "adopt": 3.0, "lift": 1.0},
    ),
    replace(
        NARROW,
        name="relayed",
        steps=2500,
        collectors=4,
        nodes=1,
        workers=4,
        ambushes=(Ambush(0.6, "condemned", "adopt"),),
        mishap=0.001,
        mishaps={"kill": 1.0, "stop": 1.0},
        work={"put": 8.0, "hold": 1.0},
        rates=Rates(
            publish=0.95,
            take=0.0,
            retake=0.9,
            settle=0.8,
            fence=0.4,
            condemn=0.4,
            await_steps=400,
            waits={
                **WAITS,
                Call.PUBLISH: ("taken", "taken>taken"),
                Call.CONDEMN: ("fence",),
                Call.RETAKE: ("published",),
                Call.SETTLE: ("published>taken", "published>taken>published", "published", "published"),
                Call.FENCE: ("taken>published>taken",),
            },
        ),
        collect={"sweep": 6.0, "adopt": 2.0, "lift": 3.0},
    ),
    replace(
        NARROW,
        name="hasty",
        mishap=0.001,
        mishaps={"stop": 1.0},
        work={"put": 1.5, "hold": 3.0, "match": 3.0},
        rates=replace(PAUSES, look=0.5, await_steps=500, waits={**WAITS, Call.LOOK: ("closed", "closed>heard")}),
        collect={"sweep": 1.0},
        collectors=1,
        dwell_long=0.02,
    ),
    replace(
        NARROW,
        name="cut",
        mishap=0.001,
        mishaps={"cut_watches": 1.0},
        cuts=0.7,
        work={"put": 2.0, "hold": 5.0, "match": 2.0},
        rates=replace(PAUSES, look=0.2, lag=0.7),
        collect={"sweep": 1.0},
        collectors=1,
        dwell_long=0.02,
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
            PAUSES, txn=0.4, take=1.0, lag=0.8, waits={**WAITS, Call.TXN: ("take",), Call.TAKE: ("claimed", "joined")}
        ),
    ),
    Profile(
        "restored",
        prompts=3,
        chunks=1,
        mishap=0.006,
        victim=0.6,
        relapse=Relapse(0.2, at=("take", "condemned", "claimed"), steps=150, times=2),
        steps=1200,
        dwell_long=0.3,
        rates=replace(PAUSES, take=0.5, meta_fails=0.003, pause_steps=800),
        mishaps={"snapshot": 4.0, "restore": 2.0, "kill": 2.0, "stop": 1.0, "land": 1.0, "compact": 1.0},
        work={"put": 4.0, "hold": 6.0, "pin": 1.0, "unpin": 1.0},
        collect={"sweep": 6.0, "adopt": 2.0, "lift": 0.3},
        swarms=True,
    ),
    replace(
        NARROW,
        name="lapsed",
        nodes=1,
        workers=4,
        mishap=0.001,
        dwell_long=0.1,
        relapse=Relapse(0.5, to=("now condemning",), at=("take",), times=3, bump=0.2),
        mishaps={"kill": 1.0, "stop": 1.0, "compact": 1.0},
        rates=replace(PAUSES, take=1.0, await_steps=800, waits={**WAITS, Call.TAKE: ("restored>claimed", "claimed")}),
        work={"put": 3.0, "hold": 6.0},
        collect={"sweep": 6.0, "adopt": 1.0},
    ),
    Profile(
        "forked",
        prompts=4,
        chunks=1,
        shard_bits=2,
        share=0.4,
        ambushes=(Ambush(0.7, "restored", "sweep", 5),),
        nodes=1,
        workers=3,
        collectors=3,
        mishap=0.001,
        victim=0.9,
        relapse=Relapse(
            0.8,
            to=("now condemning",),
            at=("heard", "heard", "condemned"),
            times=3,
            bump=0.0,
        ),
        steps=2000,
        dwell_long=0.4,
        mishaps={"compact": 1.0},
        rates=replace(
            PAUSES,
            announce=0.9,
            take=0.9,
            lag=0.5,
            await_steps=300,
            waits={**WAITS, Call.ANNOUNCE: ("restored>condemned", "condemned"), Call.TAKE: ("", "claimed", "claimed")},
        ),
        work={"put": 4.0, "hold": 6.0},
        collect={"sweep": 6.0, "adopt": 1.0},
    ),
    replace(
        NARROW,
        name="repinned",
        nodes=1,
        workers=3,
        mishap=0.001,
        mishaps={"stop": 1.0},
        relapse=Relapse(0.8, to=("now pinning",), at=("pinned",), steps=10, times=3, cut=1.0, spoils=0.5),
        rates=PAUSES,
        work={"put": 4.0, "pin": 4.0, "unpin": 1.0},
        collect={"sweep": 1.0},
    ),
    Profile(
        "paired",
        prompts=4,
        chunks=1,
        nodes=1,
        workers=4,
        collectors=4,
        steps=2500,
        mishap=0.001,
        mishaps={"stop": 1.0},
        ambushes=(Ambush(0.4, "condemned", "adopt"),),
        victim=0.7,
        dwell_long=0.1,
        share=0.9,
        rates=Rates(
            look=0.02,
            take=0.7,
            condemn=0.1,
            close=0.05,
            link=0.9,
            lag=0.4,
            await_steps=700,
            waits={
                **WAITS,
                Call.LINK: ("closed>condemned>take",),
                Call.TAKE: ("claimed", "closed>claimed", "closed>claimed"),
                Call.CONDEMN: ("condemned",),
            },
        ),
        work={"put": 4.0, "hold": 6.0},
        collect={"sweep": 6.0, "adopt": 2.0},
    ),
    replace(
        NARROW,
        name="damaged",
        mishap=0.03,
        workers=3,
        collectors=1,
        work={"put": 4.0, "hold": 6.0},
        rates=replace(PAUSES, settle=0.5, dies=0.02, waits={**WAITS, Call.SETTLE: ("", "published", "published")}),
        mishaps={"damage": 9.0, "kill": 1.0, "stop": 1.0, "land": 1.0, "expire": 0.5},
        collect={"sweep": 1.0, "adopt": 1.0, "lift": 0.5, "orphans": 2.0},
    ),
    replace(
        NARROW,
        name="objects",
        objects=True,
        collectors=3,
        stops=0.15,
        ambushes=(Ambush(0.5, "condemned", "adopt"),),
        mishaps={**MISHAPS, "stop": 3.0},
        rates=replace(
            PAUSES,
            publish=0.4,
            settle=0.3,
            take=0.6,
            condemn=0.15,
            link=0.1,
            root_fails=0.001,
            meta_fails=0.003,
            waits={
                **WAITS,
                Call.PUBLISH: ("", "taken", "closed"),
                Call.SETTLE: ("published",),
                Call.TAKE: ("published", "claimed", "closed>claimed"),
            },
        ),
        work={"put": 4.0, "hold": 4.0, "pin": 3.0, "unpin": 4.0},
        collect={"sweep": 6.0, "adopt": 6.0},
    ),
)
FULL = Profile(
    "full",
    nodes=2,
    workers=2,
    collectors=1,
    shard_bits=2,
    prompts=300,
    chunks=2,
    capacity_chunks=80,
    steps=6000,
    rates=Rates(txn=0.01, publish=0.01, lag=0.2),
    mishap=0.0007,
    mishaps={"kill_node": 1.0, "kill_counting": 2.0, "cut_watches": 1.0, "compact": 0.5},
    work={"put": 8.0, "hold": 1.0},
)
CAPACITY_PROFILES = (FULL, replace(FULL, name="full_shared", nodes=3, workers=1, collectors=2))
"""Nodes fill the root, and collectors evict. No seed chooses them: they are asked for by name."""
DEEP = ("forked", "relayed", "paired", "deposed")
"""What they are for takes many steps in the right order: they come twice as often."""
ROTATION = (*PROFILES, *(profile for profile in PROFILES if profile.name in DEEP))
"""Seeds take them in turn."""
ONE_HOST = Profile(
    "one_host",
    one_host=True,
    steps=6000,
    mishap=0.001,
    mishaps={"kill": 2.0, "kill_collector": 2.0, "leave": 0.5, "stop": 3.0},
    work={
        "put": 4.0,
        "match": 2.0,
        "hold": 4.0,
        "put_blocks": 1.0,
        "hold_blocks": 1.0,
        "pin": 1.5,
        "unpin": 1.0,
        "clear": 0.1,
    },
    swarms=True,
)
"""No seed chooses it: it is requested by name."""
BY_NAME = {profile.name: profile for profile in (*PROFILES, *CAPACITY_PROFILES, ONE_HOST)}
