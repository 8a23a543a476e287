"""A root that is filled all the time while others free room beside it: it stays below its limit, and is emptied again.

The promise (gc/PROTOCOL.md, section 6): while a collector lives and has listed the root once, used bytes are at most
the limit, however large puts and however late reports and signs are. A round that begins over the high watermark
brings the root down to the low one.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from tests.chaos.cast import SHARD_BITS, Part, cast
from tests.chaos.gauge import Gauge, used_bytes
from tests.chaos.writer import LAYOUT
from tests.kit.etcd import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs a file system of its own, and mounting needs root"),
]

MAX_BYTES = 64 << 20
TARGET = 0.95
REAPED_CHUNKS = MAX_BYTES // 2 // LAYOUT.chunk_bytes
WAIT_S = 60.0
SAMPLE_S = 0.05
RATE_BYTES = 100_000_000
"""Bytes of each writer in a second: writing as fast as they can would need memory that not every machine has."""
FILE_SYSTEM_BYTES = 2 << 30
OTHERS_BYTES = 1 << 30


@pytest.fixture
def own_tmpfs(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "tmpfs"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={FILE_SYSTEM_BYTES}", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_writers_never_pass_the_limit(own_tmpfs: Path, tmp_path: Path) -> None:
    root = own_tmpfs / "root"
    kvstore.open(str(root), shard_bits=SHARD_BITS).close()
    with cast([root], tmp_path) as players:
        limits = ["--max-bytes", str(MAX_BYTES)]
        collector = players.collector("gc", "--interval", "2s", *limits)
        eventually(lambda: players.rounds()["rounds"] > 0, patience_s=WAIT_S)
        gauge, others = Gauge(root, SAMPLE_S), own_tmpfs / "others"
        with others.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, OTHERS_BYTES)
        writers = [
            players.part(f"writer{number}", "tests.chaos.writer", "--rate", str(RATE_BYTES)) for number in range(2)
        ]
        eventually(lambda: gauge.most > 0.7 * MAX_BYTES, patience_s=WAIT_S)
        others.unlink()
        eventually(lambda: players.rounds()["reaped"] > REAPED_CHUNKS, patience_s=WAIT_S)
        for writer in writers:
            writer.end()
        eventually(lambda: used_bytes(root) <= TARGET * MAX_BYTES, patience_s=WAIT_S)
        gauge.close()
        collector.end()
        assert [writer.codes for writer in writers] == [[0], [0]]
        rounds = [json.loads(line) for line in _out(collector).splitlines()]
        wrote = [json.loads(_out(writer)) for writer in writers]
    print(f"\nwriters: {wrote}; {len(rounds)} rounds; peak {gauge.most / MAX_BYTES:.3f} of the limit")
    assert gauge.most <= 1.02 * MAX_BYTES
    assert all(each["puts"] > 0 for each in wrote)


def _out(part: Part) -> str:
    return (part.folder / f"{part.name}.{part.starts_count:03}.out").read_text()
