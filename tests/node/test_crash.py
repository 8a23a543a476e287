"""Killed with SIGKILL at any point of a put: no wrong bytes, no published chunk lost, leftovers found by fsck."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.clock import RandomIds
from kvstore.fsck import FindingKind, Options, fsck
from kvstore.root.identity import create_or_open
from kvstore.root.posix import PosixRoot
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import TINY, SetClock, kv_of, same, store_on

pytestmark = pytest.mark.slow

POINTS = ["stage.created", "stage.written", "stage.complete", "publish.before", "publish.linked", "publish.done"]
CHUNKS = 6


def put_and_die(root: str, point: str, occurrence: int) -> None:
    """Runs in a separate process: puts a prompt, and is killed at the given point."""
    left = [occurrence]

    def step(reached: str) -> None:
        if reached == point:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    tokens = np.arange(CHUNKS * TINY.chunk_tokens)
    store = store_on(PosixRoot(root, step=lambda reached: None))
    store.namespace("m", TINY).put(tokens[: TINY.chunk_tokens], kv_of(TINY, tokens[: TINY.chunk_tokens]))
    store.close()
    store = store_on(PosixRoot(root, step=step))
    cache = store.namespace("m", TINY)
    cache.put(tokens, kv_of(TINY, tokens))


def killed(root: Path, point: str, occurrence: int) -> None:
    script = f"from tests.node.test_crash import put_and_die; put_and_die({str(root)!r}, {point!r}, {occurrence})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, timeout=PATIENCE_S, check=False)
    assert ended.returncode == -signal.SIGKILL, "the point was not reached"


@pytest.mark.parametrize(("point", "occurrence"), [(point, 1 + 2 * (at % 2)) for at, point in enumerate(POINTS)])
def test_killed_at_any_point_of_put(tmp_root: Path, point: str, occurrence: int) -> None:
    tokens = np.arange(CHUNKS * TINY.chunk_tokens)
    kv = kv_of(TINY, tokens)
    killed(tmp_root, point, occurrence)
    with store_on(tmp_root) as store:
        cache = store.namespace("m", TINY)
        before = cache.match(tokens)
        assert before >= TINY.chunk_tokens, "what was acknowledged before is still there"
        count, found = cache.get(tokens)
        assert count == before and same(found, kv[:, :, :count])
        assert store.stats()["miss_damaged"] == 0, "nothing torn is ever visible under a final name"
        root = PosixRoot(tmp_root)
        identity = create_or_open(root, RandomIds())
        later = SetClock(time.time() + 2 * 3600)
        found_by_fsck = fsck(root, identity, clock=later)
        leftovers = [finding for finding in found_by_fsck.findings if finding.kind is FindingKind.ORPHAN_STAGING]
        if point != "publish.done":
            assert leftovers, "the staged file of the dead process is found"
        fsck(root, identity, Options(repair=True), clock=later)
        assert fsck(root, identity, clock=later).is_clean
        assert cache.put(tokens, kv).tokens_present == len(tokens)
        count, found = cache.get(tokens)
        assert count == len(tokens) and same(found, kv)
