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
<<<<<<< HEAD
=======
from kvstore.native import library as native
from kvstore.node import writer as node_writer
from kvstore.node.chunk_store import Places, StoredRun
from kvstore.node.writer import RootWrite
>>>>>>> engine
from kvstore.recency import QUANTUM_S, is_fresh
from tests.kit.heartbeat import others_run_during
from tests.kit.peers import CHUNK, files_under, finish, is_kv_of, kv_of, open_cache, prompt, start

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


<<<<<<< HEAD
=======
def test_put_on_a_full_disk_keeps_space_for_its_first_chunk(small_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk finds no room, and the lanes that took it are still at work."""
    layout = Layout(layers=1, kv_heads=1, head_dim=65_536, dtype="int8", chunk_tokens=4)  # chunks of 512 KiB
    is_full, needs_room = threading.Event(), threading.Event()
    really_stage, make_room = StoredRun.stage_turn, RootWrite.make_room

    def stage(self: StoredRun) -> tuple[Places, bool]:
        taken, more = really_stage(self)
        if native.OTHER in self.items[taken]["status"]:
            is_full.set()
        if 0 in taken:
            assert is_full.wait(PATIENCE_S)
            self.items["status"][taken] = native.OTHER
        else:
            assert needs_room.wait(PATIENCE_S)
        return taken, more

    def told_to_make_room(self: RootWrite, index: int) -> bool:
        needs_room.set()
        return make_room(self, index)

    monkeypatch.setattr(node_writer, "STEP_BYTES", 4 * layout.chunk_bytes)
    monkeypatch.setattr(node_writer, "TURN_BYTES_MAX", 4 * layout.chunk_bytes)
    monkeypatch.setattr(node_writer, "ROOM_S", PATIENCE_S)
    monkeypatch.setattr(StoredRun, "stage_turn", stage)
    monkeypatch.setattr(RootWrite, "make_room", told_to_make_room)
    with kvstore.open(str(small_root), max_bytes=None) as store:
        cache = store.namespace("model", layout)
        with pytest.raises(errors.Overloaded, match="No space left"):
            cache.put(list(range(64)), np.zeros(layout.shape(64), np.int8), required=True)
        assert 0 < cache.match(list(range(64))) < 64


def test_more_than_65536_tokens_are_stored_and_found(store: Store) -> None:
    layout = Layout(layers=1, kv_heads=1, head_dim=4, dtype="int8", chunk_tokens=512)
    cache = store.namespace("long", layout)
    tokens = np.arange(70_144)
    kv = np.random.default_rng(8).integers(-128, 128, layout.shape(len(tokens)), dtype=np.int8)
    assert cache.put(tokens, kv).tokens_present == 70_144
    assert cache.match(tokens) == 70_144
    matched, found = cache.get(tokens)
    assert matched == 70_144
    assert np.array_equal(found, kv)


def test_another_process_sees_a_put_when_put_returns(tmp_root: Path, cache: Cache) -> None:
    reader = start("look_for", str(tmp_root), 1)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "0\n"
    cache.put(prompt(1), kv_of(prompt(1)))
    assert finish(reader, "\n") == "12\n"


>>>>>>> engine
def test_queries_never_fail_while_another_process_puts(tmp_root: Path, cache: Cache) -> None:
    count = 200
    reader = start("query_while_updated", str(tmp_root), count)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "ready\n"
    tokens = prompt(1, count)
    kv = kv_of(tokens)
    for end in range(CHUNK, len(tokens) + 1, CHUNK):
        assert cache.put(tokens[:end], kv[:, :, end - CHUNK : end], prefix=end - CHUNK).tokens_present == end
    seen = json.loads(finish(reader))
    assert seen == sorted(seen)
    assert seen[-1] == len(tokens)
