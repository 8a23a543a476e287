"""Real processes on a real root with a real etcd, all of them killed, stopped and started again at random.

KVSTORE_CHAOS_S is how long, KVSTORE_CHAOS_SEED which attacks; ``make chaos`` runs five minutes and shows the figures.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.play import play

SECONDS = float(os.environ.get("KVSTORE_CHAOS_S", "15"))
SEED = int(os.environ.get("KVSTORE_CHAOS_SEED", "1"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 600)]


def test_no_promise_is_broken_whoever_is_killed_or_stopped(tmp_root: Path, tmp_path: Path) -> None:
    print(f"\n{SECONDS:g} s, seed {SEED}\n{play([tmp_root], tmp_path, seconds=SECONDS, seed=SEED)}")
