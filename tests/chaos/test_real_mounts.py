"""The chaos run on real distributed file systems with nodes and collectors on two mounts: ``pytest -m real_fs``.

With the weak guarantee a held or pinned chunk may be missing for a while, and is counted; at the end all pins must be
readable again, and no byte may ever be wrong.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.conftest import is_weak
from tests.chaos.play import play
from tests.chaos.test_chaos import SECONDS, SEED

pytestmark = [pytest.mark.slow, pytest.mark.real_fs, pytest.mark.timeout(SECONDS + 240)]


def test_no_promise_is_broken_on_two_mounts(two_mounts: list[Path], tmp_path: Path) -> None:
    weak = is_weak(two_mounts[0])
    outcome = play(two_mounts, tmp_path, seconds=SECONDS, seed=SEED, weak=weak)
    print(f"\n{SECONDS:g} s, seed {SEED}, {'weak' if weak else 'strong'} guarantee\n{outcome}")
