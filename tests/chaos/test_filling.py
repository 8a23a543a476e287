"""A root that is filled all the time: by how much writers pass the limit, and that room is made again.

What is promised (gc/PROTOCOL.md, section 6): a collector looks at the free space every second, and above the stop mark,
the middle between the high watermark and the limit, it tells the nodes to shed puts.  So used bytes pass the high
watermark by at most

    (stop - high) x limit  +  rate of writing x (one look + REACTION_S)  +  what is in flight, one put of each writer

while a collector lives and has listed the root once.  A round that begins over the high watermark takes what was there
down to the low one.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore_gc.watch import TICK_S
from tests.chaos.cast import SHARD_BITS, Part, cast
from tests.chaos.gauge import Gauge, Sample, used_bytes
from tests.chaos.writer import PROMPT_BYTES
from tests.etcd_fixture import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs a file system of its own, and mounting needs root"),
]

MAX_BYTES = 200 << 20
HIGH, LOW = 0.9, 0.8
STOP = (HIGH + 1) / 2
SECONDS = 15.0
SAMPLE_S = 0.05
REACTION_S = 1.0
"""From the look until the last node has heard of it: a call to etcd and a watch, on cores that others keep busy."""
RATE_BYTES = 100_000_000
"""Of each writer in a second: as fast as they can would need memory that not every machine has."""
FILE_SYSTEM_BYTES = 2 << 30


@pytest.fixture
def own_tmpfs(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "tmpfs"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={FILE_SYSTEM_BYTES}", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_writers_pass_the_limit_by_what_they_write_between_two_looks(own_tmpfs: Path, tmp_path: Path) -> None:
    root = own_tmpfs / "root"
    kvstore.open(str(root), shard_bits=SHARD_BITS).close()
    with cast([root], tmp_path) as players:
        limits = ["--max-bytes", str(MAX_BYTES), "--high", str(HIGH), "--low", str(LOW)]
        collector = players.collector("gc", "--interval", "2s", *limits)
        eventually(lambda: players.rounds()["rounds"] > 0)
        gauge = Gauge(root, SAMPLE_S)
        writers = [
            players.part(f"writer{number}", "tests.chaos.writer", "--rate", str(RATE_BYTES)) for number in range(2)
        ]
        time.sleep(SECONDS)
        for writer in writers:
            writer.end()
        eventually(lambda: used_bytes(root) <= HIGH * MAX_BYTES)
        gauge.close()
        collector.end()
        assert [writer.codes for writer in writers] == [[0], [0]]
        rounds = [json.loads(line) for line in _out(collector).splitlines()]
        wrote = [json.loads(_out(writer)) for writer in writers]
    written = RATE_BYTES * (TICK_S + REACTION_S) + PROMPT_BYTES
    margin = (STOP - HIGH) * MAX_BYTES + len(writers) * written
    over = gauge.most - HIGH * MAX_BYTES
    print(
        f"\nwriters: {wrote}; {len(rounds)} rounds\n"
        f"over the high watermark of {HIGH * MAX_BYTES / 1e6:.0f} MB: {over / 1e6:.0f} MB, "
        f"promised {margin / 1e6:.0f} MB; {longest_climb_s(gauge.samples):.2f} s from the stop mark to the peak"
    )
    assert over <= margin
    assert all(each["puts"] > 0 and each["shed"] > 0 for each in wrote), "the root was never full"
    full = [each for each in rounds if each["used_bytes_before"] > HIGH * MAX_BYTES]
    assert full and all(each["used_bytes_after"] <= LOW * MAX_BYTES for each in full)


def longest_climb_s(samples: list[Sample]) -> float:
    """The longest time from when used bytes pass the stop mark until they grow no more."""
    longest, passed_s, peak = 0.0, 0.0, 0
    for at_s, size in samples:
        if size <= STOP * MAX_BYTES:
            passed_s = 0.0
        elif not passed_s:
            passed_s, peak = at_s, size
        elif size > peak:
            peak, longest = size, max(longest, at_s - passed_s)
    return longest


def _out(part: Part) -> str:
    return (part.folder / f"{part.name}.{part.starts_count:03}.out").read_text()
