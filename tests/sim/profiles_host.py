"""Profiles of runs on one host, with the metadata in a file. No seed chooses them: they are asked for by name."""

from __future__ import annotations

from dataclasses import replace

from tests.sim.faults import Rates
from tests.sim.profiles import CALM, NARROW, PAUSES, PROFILES, Profile, Relapse

LOSSES = {"remove_file": 1.0, "damage_file": 1.0, "old_copy": 1.0}
FILE_MISHAPS = {**LOSSES, "reboot": 0.3}
HOST_PROFILES = (
    Profile(
        "host",
        host=True,
        steps=5000,
        rates=replace(CALM, root_fails=0.0, statement=0.002, dies=0.0003),
        mishap=0.001,
        mishaps={"kill": 2.0, "stop": 4.0, "leave": 0.3, "expire": 1.0, "compact": 0.5, **FILE_MISHAPS},
    ),
    replace(
        NARROW,
        name="host_stopped",
        host=True,
        steps=6000,
        mishap=0.002,
        mishaps={"stop": 6.0, "kill": 1.0, "expire": 1.0},
        rates=replace(PAUSES, look=0.1, take=0.6, txn=0.1, statement=0.01, pause_steps=2000, await_steps=1500),
        work={"put": 3.0, "hold": 5.0, "pin": 1.0, "unpin": 1.0},
    ),
    replace(
        NARROW,
        name="host_older",
        host=True,
        steps=5000,
        mishap=0.0005,
        dwell_long=0.3,
        mishaps={"kill": 1.0, "stop": 2.0, **FILE_MISHAPS},
        relapse=Relapse(
            0.4,
            to=("now condemning", "now pinning", "now joining"),
            at=("take", "claimed", "pinned"),
            steps=60,
            times=3,
        ),
        rates=replace(PAUSES, take=0.8, statement=0.004, await_steps=1500),
        work={"put": 4.0, "hold": 6.0, "pin": 2.0, "unpin": 1.0},
    ),
)
"""On one host, with the metadata in a file. Not among those that a seed chooses from."""

BOUNDED = Profile(
    "host_claims",
    host=True,
    bounded=True,
    nodes=3,
    workers=1,
    collectors=0,
    shard_bits=0,
    prompts=300,
    chunks=1,
    steps=8000,
    rates=Rates(txn=0.02, statement=0.001, publish=0.01),
    mishap=0.002,
    mishaps={"retire": 8.0, "kill": 0.3},
    work={"put": 1.0},
)
COUNTED = replace(
    BOUNDED,
    name="host_counted",
    collectors=1,
    steps=14_000,
    rates=Rates(txn=0.01, statement=0.0005, publish=0.01),
    mishap=0.0007,
    mishaps={"retire": 0.5, "end_counting": 3.0, "kill_counting": 3.0},
)
LOST = replace(
    BOUNDED,
    name="host_lost",
    nodes=2,
    prompts=100,
    bound_chunks=32,
    claim_share=1 / 128,
    steps=18_000,
    rates=Rates(read=0.003, txn=0.01, statement=0.0005, publish=0.02, count=0.1, dies=0.0003),
    mishap=0.001,
    mishaps={"retire": 1.0, "kill": 1.0, "stop": 1.0, "expire": 1.0, "lock_file": 1.0, **FILE_MISHAPS},
    work={"put": 8.0, "hold": 1.0, "pin": 0.5, "unpin": 0.3},
)
BOUND_PROFILES = (
    BOUNDED,
    replace(
        BOUNDED,
        name="host_lent",
        steps=12_000,
        mishap=0.01,
        mishaps={"expire": 3.0, "retire": 1.0, "retire_lent": 12.0},
    ),
    COUNTED,
    replace(COUNTED, name="host_large", chunks=12, prompts=100, mishaps={"retire": 0.1, "kill_counting": 1.0}),
    LOST,
    replace(
        LOST,
        name="host_lost_counted",
        collectors=1,
        nodes=3,
        chunks=2,
        bound_chunks=BOUNDED.bound_chunks,
        claim_share=BOUNDED.claim_share,
        interval_s=60.0,
        rates=replace(LOST.rates, dies=0.0),
        mishaps={**LOSSES, "expire": 1.0, "lock_file": 0.5, "kill_counting": 0.2, "end_counting": 0.2},
    ),
)
"""On one host, with a bound: before any collector (S6), with sessions that end, with collectors that come and go, with
puts of more than X, and with metadata that are lost (S8), also beside a collector, which no node's death excuses."""
BY_NAME = {profile.name: profile for profile in (*PROFILES, *HOST_PROFILES, *BOUND_PROFILES)}
