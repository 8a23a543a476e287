"""One root, several processes: what file-based caches of others get wrong (races, torn files, pids, hash seeds, locks).

Damaged files, holes, recency and errors of the root are tested in ``tests/node``.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from kvstore import Layout
from kvstore.client import Cache, Store
from kvstore.core.recency import QUANTUM_S, is_fresh
from tests.kit.heartbeat import others_run_during
from tests.kit.peers import files_under, finish, is_kv_of, kv_of, open_cache, prompt, start

pytestmark = pytest.mark.slow


def test_pollers_cost_no_prompt_a_chunk(tmp_root: Path, cache: Cache) -> None:
    count = 300
    pollers = [start("poll", str(tmp_root), count) for _ in range(2)]
    for poller in pollers:
        assert poller.stdout is not None
        assert poller.stdout.readline() == "ready\n"
    for number in range(count):
        assert cache.put(prompt(number), kv_of(prompt(number))).tokens_present == 12
    for poller in pollers:
        assert json.loads(finish(poller)) == {"wrong": 0, "seen": count, "damaged": 0}
    assert len(files_under(tmp_root / "chunks")) == 3 * count
    assert not files_under(tmp_root / "quarantine")


def _own_pid_namespace() -> list[str] | None:
    """Returns the command prefix that makes a command pid 1 of its own namespace, if this user may make one."""
    for words in (["unshare", "--pid", "--fork"], ["unshare", "--user", "--map-root-user", "--pid", "--fork"]):
        if (
            shutil.which("unshare")
            and subprocess.run([*words, "true"], capture_output=True, timeout=60, check=False).returncode == 0
        ):
            return words
    return None


def test_two_containers_with_one_pid_write_the_same_prompts(tmp_root: Path) -> None:
    before = _own_pid_namespace()
    pretend = 0 if before else 4_711
    writers = [start("put_and_read_back", str(tmp_root), 0, 60, pretend, before=before or ()) for _ in range(2)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    reports = [json.loads(finish(writer)) for writer in writers]
    assert reports[0]["pid"] == reports[1]["pid"]
    for report in reports:
        assert (report["short"], report["missed"], report["wrong"], report["failed"]) == (0, 0, 0, {})
    assert len(files_under(tmp_root / "chunks")) == 180
    assert not files_under(tmp_root / "staging")


def test_chunks_of_a_dead_writer_are_found_and_fresh(tmp_root: Path) -> None:
    quantum = int(time.time()) // QUANTUM_S * QUANTUM_S
    finish(start("put_and_die", str(tmp_root), 1))
    store, cache = open_cache(tmp_root)
    with store:
        assert all(is_fresh(path.stat().st_mtime_ns, quantum) for path in files_under(tmp_root / "chunks"))
        matched, kv = cache.get(prompt(1))
        assert matched == 12
        assert is_kv_of(kv, prompt(1))


def test_other_threads_run_during_put_and_get(store: Store) -> None:
    layout = Layout(layers=1, kv_heads=32, head_dim=1024, dtype="float16", chunk_tokens=512)  # one file of 64 MiB
    cache = store.namespace("large", layout)
    kv, numbers = np.zeros(layout.shape(512), np.float16), itertools.count()
    assert others_run_during(lambda: cache.put(np.full(512, next(numbers)), kv))
    assert others_run_during(lambda: cache.get(np.full(512, 0), out=kv))
