"""Profiles of runs on one host, with the metadata in a file. No seed chooses them: they are asked for by name."""

from __future__ import annotations

from dataclasses import replace

from tests.sim.profiles import CALM, CAPACITY_PROFILES, NARROW, PAUSES, PROFILES, Profile, Relapse

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

BY_NAME = {profile.name: profile for profile in (*PROFILES, *HOST_PROFILES, *CAPACITY_PROFILES)}
