"""Real nodes, real collectors and a real etcd: a root stays below its limit, and puts go on, whatever others do.

Bytes are asserted, never times: a node stops by itself until a collector has counted what it wrote, so a busy machine
makes these tests slow, and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Layout
from kvstore.meta.etcd import EtcdMeta
from kvstore.meta.keys import Keys
from kvstore.meta.usage import Room
from kvstore.root.identity import read_identity
from kvstore.root.posix import PosixRoot
from kvstore.root.reserve import RESERVE_BYTES
from tests.kit.etcd import eventually, running_etcd

MIB = 1 << 20
LAYOUT = Layout(layers=4, kv_heads=4, head_dim=128, dtype="int8", chunk_tokens=64)
CHUNKS = 8
PROMPT_BYTES = CHUNKS * (LAYOUT.chunk_bytes + 8192)
"""With headers."""
CAP_BYTES = 16 * MIB
RECORDS_BYTES = RESERVE_BYTES + (256 << 10)
"""The reserve, plans, small records in pages: nobody counts them."""
OTHERS_BYTES = 64 * MIB
WRITERS = 2
PUTS = 6
"""Bytes of each writer: together half as much again as the limit."""
BACKOFF_S = 0.02
WAIT_S = 150.0

pytestmark = pytest.mark.slow


@dataclass
class Gauge:
    """The peak of used bytes of a root's own file system: one call, where a walk would count moved files twice."""

    mount: Path
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self) -> None:
        found = os.statvfs(self.mount)
        with self.lock:
            self.most = max(self.most, (found.f_blocks - found.f_bfree) * found.f_frsize)


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A separate file system, which others use as well."""
    if os.geteuid() != 0:
        pytest.skip("needs a file system of its own, and mounting needs root")
    mount = tmp_path / "volume"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={2 * OTHERS_BYTES}", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@contextmanager
def collector(root: Path, etcd: str, max_bytes: int, log: Path) -> Iterator[list[dict[str, Any]]]:
    """Runs ``kvstore-gc`` until the block ends, which begins once it has listed the root; returns its output."""
    command = [sys.executable, "-m", "kvstore_gc", "--root", str(root), "--etcd", etcd, "--json"]
    said: list[dict[str, Any]] = []
    command += ["--interval", "1s", "--max-bytes", str(max_bytes)]
    with (
        open(log, "w") as messages,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=messages, text=True) as child,
    ):
        assert child.stdout is not None
        lines = child.stdout
        said.append(json.loads(lines.readline()))
        thread = threading.Thread(target=lambda: said.extend(map(json.loads, lines)), daemon=True)
        thread.start()
        try:
            yield said
        finally:
            child.terminate()
            thread.join()


def wait_for_word(root: Path, etcd: str) -> None:
    """Waits until nodes are told what they may write: the bound applies from then, just after the first survey."""
    identity = read_identity(PosixRoot(root))
    assert identity is not None
    meta = EtcdMeta(etcd)
    try:

        def is_said() -> bool:
            found = meta.get(Keys(identity.root).gc_room)
            return found is not None and Room.from_json(found.value).allowance_bytes is not None

        eventually(is_said)
    finally:
        meta.close()


def write(root: Path, etcd: str, name: str, gauge: Gauge, ends_s: float) -> int:
    """Stores PUTS new prompts, and repeats those that were shed; returns how many it stored."""
    tokens = np.zeros(CHUNKS * LAYOUT.chunk_tokens, np.uint32)
    kv = np.ones(LAYOUT.shape(len(tokens)), np.int8)
    stored = 0
    with kvstore.open(str(root), etcd) as store:
        cache = store.namespace(name, LAYOUT)
        while stored < PUTS and time.monotonic() < ends_s:
            tokens[0] = stored
            result = cache.put(tokens, kv)
            stored += result.tokens_present == len(tokens)
            if result.reason:
                time.sleep(BACKOFF_S)
            gauge.look()
    return stored


def fill(root: Path, etcd: str, gauge: Gauge) -> list[int]:
    """Runs WRITERS at once, each on its own node; returns how many prompts each stored."""
    stored, ends_s = [0] * WRITERS, time.monotonic() + WAIT_S

    def one(number: int) -> None:
        stored[number] = write(root, etcd, f"writer{number}", gauge, ends_s)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(WRITERS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return stored


def test_room_that_others_free_hides_no_growth(volume: Path, tmp_path: Path) -> None:
    root, others = volume / "root", volume / "others"
    kvstore.open(str(root), shard_bits=2).close()
    with others.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, OTHERS_BYTES)
    gauge = Gauge(volume)
    with running_etcd(tmp_path / "etcd") as etcd, collector(root, etcd.endpoints, CAP_BYTES, tmp_path / "log") as said:
        wait_for_word(root, etcd.endpoints)
        others.unlink()
        stored = fill(root, etcd.endpoints, gauge)
        assert stored == [PUTS] * WRITERS, (stored, said[-1], (tmp_path / "log").read_text()[-2000:])
    assert CAP_BYTES // 2 < gauge.most <= CAP_BYTES + WRITERS * PROMPT_BYTES + RECORDS_BYTES, gauge.most / CAP_BYTES


def test_collectors_with_different_limits_keep_to_the_smallest_and_puts_go_on(volume: Path, tmp_path: Path) -> None:
    root = volume / "root"
    kvstore.open(str(root), shard_bits=2).close()
    gauge = Gauge(volume)
    small, large = CAP_BYTES // 4, 64 * CAP_BYTES
    with running_etcd(tmp_path / "etcd") as etcd, ExitStack() as undo:
        undo.enter_context(collector(root, etcd.endpoints, small, tmp_path / "small"))
        said = undo.enter_context(collector(root, etcd.endpoints, large, tmp_path / "large"))
        wait_for_word(root, etcd.endpoints)
        stored = fill(root, etcd.endpoints, gauge)
        assert stored == [PUTS] * WRITERS, (stored, said[-1], (tmp_path / "large").read_text()[-2000:])
        log = (tmp_path / "large").read_text()
    assert gauge.most <= small + WRITERS * PROMPT_BYTES + RECORDS_BYTES
    assert log.count("gc.smaller_limit") == 1 and f"max_bytes={small}" in log
    assert said[-1]["limit_bytes"] == small
    assert "gc.smaller_limit" not in (tmp_path / "small").read_text()
