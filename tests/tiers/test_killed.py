"""Killed with SIGKILL while its queue is full: chunks acknowledged behind and not yet written are missing.

Nothing else is missing, and nothing is damaged (MEMORY.md, the table of "Writing").
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.fsck import Kind, fsck
from kvstore.hints import Hints
from kvstore.root.identity import create_or_open
from kvstore.root.posix import PosixRoot
from kvstore.sources import RandomIds
from kvstore.writes import WriteMode
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import SetClock
from tests.kit.tiers import Acting, quick

pytestmark = pytest.mark.slow

CHUNKS = 6
STEP_S = 0.01
"""How long a step of a write takes at first. A machine may be so busy that puts come slower than such steps, so steps
take longer until the queue is full."""
STEP_S_MAX = 1.0
PATIENT_PUTS = 20


def put_until_killed(root: str, seed: int) -> None:
    """Runs in a separate process: puts prompts, and prints each acknowledged one on a line."""
    chosen = random.Random(seed)
    step_s = 0.0
    taken = 0

    def step(_: str) -> None:
        if step_s:
            time.sleep(step_s * chosen.random())

    node = Acting(PosixRoot(root, step=step), limits=quick(behind_wait_s=0.001))
    number = 0
    for number in range(1, 4):
        node.put(number, CHUNKS)
    node.drain()
    told = {"drained": [1, 2, 3]}
    print(json.dumps(told), flush=True)
    step_s = STEP_S
    while True:
        number += 1
        taken += 1
        if taken == PATIENT_PUTS:
            step_s, taken = min(2 * step_s, STEP_S_MAX), 0
        write = chosen.choice([WriteMode.BEHIND, WriteMode.BEHIND, WriteMode.BEHIND, WriteMode.THROUGH])
        prefix = chosen.choice([0, 0, 3])
        if prefix:
            node.put(number, prefix, write=write)
        result = node.put(number, CHUNKS, first=prefix, write=write, hints=Hints())
        count = result.tokens_present // node.size
        if count < CHUNKS:
            taken = 0
        print(json.dumps({"number": number, "count": count, "write": write.value}), flush=True)


@pytest.mark.parametrize("seed", range(3))
def test_sigkill_with_a_full_queue(tmp_root: Path, seed: int) -> None:
    script = f"from tests.tiers.test_killed import put_until_killed; put_until_killed({str(tmp_root)!r}, {seed})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        acknowledged: list[dict[str, object]] = []
        shed = 0
        json.loads(child.stdout.readline())
        while shed < 2 + seed:
            acknowledged.append(json.loads(child.stdout.readline()))
            shed += acknowledged[-1]["count"] != CHUNKS
    finally:
        os.kill(child.pid, signal.SIGKILL)
        rest = child.stdout.read()
        child.wait(PATIENCE_S)
    acknowledged += [json.loads(line) for line in rest.splitlines() if line.endswith("}")]
    counts = dict.fromkeys(range(1, 4), CHUNKS)
    missing = 0
    with Acting(PosixRoot(tmp_root)) as node:
        for one in acknowledged:
            assert isinstance(one["number"], int) and isinstance(one["count"], int)
            counts[one["number"]] = one["count"]
        for number, count in counts.items():
            there = node.on_root(number, CHUNKS)
            written = sum(there)
            assert there == [True] * written + [False] * (CHUNKS - written), "parents first (W2)"
            waited = number <= 3 or next(one for one in acknowledged if one["number"] == number)["write"] != "behind"
            assert written == count if waited else written <= count, "nothing else is missing, nor there"
            missing += count - written
            assert node.match(number, CHUNKS) == written and node.get(number, CHUNKS) == written
        assert missing > 0, "the queue was full"
        assert node.stat("miss_damaged") == 0
        root = PosixRoot(tmp_root)
        later = SetClock(time.time() + 2 * 3600)
        found = fsck(root, create_or_open(root, RandomIds()), clock=later)
        assert {finding.kind for finding in found.findings} <= {Kind.ORPHAN_STAGING}
        for number in counts:
            node.put(number, CHUNKS)
            node.drain()
            assert node.get(number, CHUNKS) == CHUNKS
