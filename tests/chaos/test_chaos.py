"""Real processes on a real root with a real etcd, all of them killed, stopped and started again at random.

KVSTORE_CHAOS_S is how long, KVSTORE_CHAOS_SEED which attacks. ``make chaos-test`` runs five minutes and prints figures.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.play import play, play_on_host

SECONDS = float(os.environ.get("KVSTORE_CHAOS_S", "6"))
SEED = int(os.environ.get("KVSTORE_CHAOS_SEED", "1"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 600)]


def test_no_promise_is_broken_whoever_is_killed_or_stopped(tmp_root: Path, tmp_path: Path) -> None:
    print(f"\n{SECONDS:g} s, seed {SEED}\n{play(tmp_root, tmp_path, seconds=SECONDS, seed=SEED)}")


def test_promises_on_one_host_are_kept_under_attack(tmp_path: Path) -> None:
    print(f"\n{SECONDS:g} s, seed {SEED}\n{play_on_host(tmp_path, seconds=SECONDS, seed=SEED, breath_s=0.02)}")
