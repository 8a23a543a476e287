"""Hosts and NFS servers that lose power while chunks are put, and boot again: ``make crash-test``."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest

from tests.hosts.crashing import ON_NFS
from tests.hosts.guests import BOOT_S, Export, make_disk, missing, on_disk, wait_for
from tests.kit.patience import eventually

pytestmark = [pytest.mark.crashes, pytest.mark.skipif(bool(missing()), reason=missing())]
CUTS = int(os.environ.get("KVSTORE_CRASH_CUTS", "5"))
SERVER_CUTS = max(1, CUTS // 2)
"""Clients wait for a server that has booted until its grace is over, so each takes a minute."""
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
        assert found["wrong"] == 0 and found["acked"] > 0 and found["after_repair"] == 0
        if durability == "fsync":
            assert found["lost"] == 0
        if durability == "everysec":
            assert found["oldest_lost_s"] <= EVERYSEC_MAX_S
        (work / "disk.img").unlink()


@pytest.mark.parametrize("options", ["vers=4.2", "vers=3,nolock"], ids=["4.2", "3"])
def test_a_server_that_loses_power_loses_no_acknowledged_chunk(tmp_path: Path, options: str) -> None:
    """Its export is ``sync``, so a put returns when the server's disk has the chunk."""
    dice = random.Random(options)
    job = f"tests.hosts.crashing {{}} none through {tmp_path} {ON_NFS}"
    with Export(tmp_path, 2, options) as export:
        writer = export.boot(1, job.format("write"))
        wait_for(tmp_path / "acks", BOOT_S)
        for _ in range(SERVER_CUTS):
            time.sleep(dice.uniform(*PUTS_S))
            export.boot_server()
            _wait_for_more(tmp_path / "acks")
        (tmp_path / "ends").touch()
        writer.output(CHECK_S)
        found = json.loads(export.boot(2, job.format("check")).output(CHECK_S).splitlines()[-1])
    print(f"nfs {options}: {found}", flush=True)
    assert found["acked"] > 0
    assert (found["wrong"], found["lost"], found["damaged"], found["after_repair"]) == (0, 0, 0, 0)


def _wait_for_more(acks: Path) -> None:
    """Waits until the clients go on."""
    before_bytes = acks.stat().st_size
    eventually(lambda: acks.stat().st_size > before_bytes, "another put", BOOT_S)
