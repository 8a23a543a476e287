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
    print(f"\n{SECONDS:g} s, seed {SEED}\n{play([tmp_root], tmp_path, seconds=SECONDS, seed=SEED)}")


def test_no_promise_is_broken_on_one_host_whose_file_is_removed_and_damaged(tmp_path: Path) -> None:
    """Short, with nodes that rest most of the time, unless it is to last."""
    is_long = "KVSTORE_CHAOS_S" in os.environ
    seconds, breath_s, files_s = (SECONDS, 0.002, 15.0) if is_long else (4.0, 0.1, 2.0)
    print(f"\n{seconds:g} s, seed {SEED}")
    print(play_on_host(tmp_path, seconds=seconds, seed=SEED, breath_s=breath_s, files_s=files_s))
