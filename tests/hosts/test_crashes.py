"""A host with a disk that loses power while it puts, and boots again: ``make crash-test``."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest

from tests.hosts.guests import BOOT_S, make_disk, missing, on_disk, wait_for

pytestmark = [pytest.mark.crashes, pytest.mark.skipif(bool(missing()), reason=missing())]
CUTS = int(os.environ.get("KVSTORE_CRASH_CUTS", "3"))
PUTS_S = (3.0, 8.0)
CHECK_S = 240.0
EVERYSEC_MAX_S = 5.0
"""A second, and the time of two syncs on a machine whose cores others use."""


@pytest.mark.parametrize("file_system", ["ext4", "xfs"])
@pytest.mark.parametrize(
    ("durability", "write"), [("fsync", "through"), ("everysec", "through"), ("none", "through"), ("none", "behind")]
)
def test_a_power_cut_loses_what_the_durability_says(
    tmp_path: Path, file_system: str, durability: str, write: str
) -> None:
    dice = random.Random(f"{file_system} {durability} {write}")
    for cut in range(CUTS):
        work = tmp_path / str(cut)
        work.mkdir()
        make_disk(work / "disk.img", file_system)
        job = f"tests.hosts.crashing {{}} {durability} {write} {work}"
        host = on_disk(work, "first", file_system, job.format("write"))
        try:
            wait_for(work / "acks", BOOT_S)
            time.sleep(dice.uniform(*PUTS_S))
        finally:
            host.kill()
        again = on_disk(work, "second", file_system, job.format("check"))
        try:
            found = json.loads(again.output(CHECK_S).splitlines()[-1])
        finally:
            again.kill()
        print(f"{file_system} {durability} {write}: {found}", flush=True)
        assert found["wrong"] == 0 and found["acked"] > 0
        if durability == "fsync":
            assert found["lost"] == 0
        if durability == "everysec":
            assert found["oldest_lost_s"] <= EVERYSEC_MAX_S
        (work / "disk.img").unlink()
