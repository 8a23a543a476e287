"""Embedded stores that bound themselves: by claims at first, then by a collector that one of the processes runs (S6).

Bytes are asserted, never times: a node stops by itself until a collector has counted what it wrote.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.errors import InvalidRequest, Overloaded, RootMismatch
from kvstore.format.places import BOUND, METADATA, RESERVE
from kvstore.meta.sqlite import host
from kvstore.meta.sqlite.file import MetadataFile
from kvstore.node import collecting
from kvstore.root import bound
from tests.kit.bound_process import CHUNKS, LAYOUT, PROMPT_BYTES, kv, tokens
from tests.kit.bounding import (
    BOUND_BYTES,
    MIB,
    NEVER,
    RECORDS_BYTES,
    TOKENS_COUNT,
    Gauge,
    collector,
    collectors,
    matched,
    prompts,
    put,
    put_until,
    writing,
)
from tests.kit.cases import for_each
from tests.kit.patience import eventually


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A separate file system: its used bytes are one number, where a walk would count moved files twice."""
    mount = tmp_path / "volume"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={8 * BOUND_BYTES}", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def fill(other: Path) -> None:
    """Leaves not a byte free on the file system of this file."""
    with open(other, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "START_S", 0.0)


# The bound


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_processes_that_write_as_fast_as_they_can_stay_below_the_bound(volume: Path, count: int) -> None:
    root, enough = volume / "root", 2 * BOUND_BYTES // PROMPT_BYTES
    with Gauge(volume) as gauge, writing(root, count, start_s=NEVER) as writers:
        eventually(lambda: sum(each.stats()[1] for each in writers) > enough, "twice the bound is written")
        assert len(collectors(root)) == 1, "one of them is elected, though none was to start a collector by its time"
        for each in writers:
            each.end()
    assert BOUND_BYTES // 2 < gauge.most <= BOUND_BYTES + RECORDS_BYTES, gauge.most
    assert collectors(root) == []


@pytest.mark.slow
def test_the_bound_holds_across_restarts_and_kills(volume: Path) -> None:
    root = volume / "root"
    with Gauge(volume) as gauge:
        for number in range(4):
            with writing(root, start_s=NEVER) as (writer,):
                most = BOUND_BYTES // PROMPT_BYTES // 2
                eventually(lambda writer=writer, most=most: writer.stats()[1] > most)  # type: ignore[misc]
                if number % 2:
                    writer.child.kill()
                else:
                    writer.end()
    assert BOUND_BYTES // 2 < gauge.most <= BOUND_BYTES + RECORDS_BYTES, gauge.most


@pytest.mark.slow
def test_the_bound_holds_while_writers_and_collectors_are_killed_in_quick_turns(volume: Path) -> None:
    """New writers begin while the word of a killed collector stands, which has not counted them."""
    root, some = volume / "root", BOUND_BYTES // PROMPT_BYTES // 2
    with Gauge(volume) as gauge:
        for _ in range(2):
            with writing(root, 2) as writers:
                eventually(lambda ws=writers: sum(each.stats()[1] for each in ws) > some)  # type: ignore[misc]
                for pid in collectors(root):
                    os.kill(pid, signal.SIGKILL)
                writers[0].child.kill()
                writers[1].end()
    assert BOUND_BYTES // 2 < gauge.most <= BOUND_BYTES + RECORDS_BYTES, gauge.most


def test_the_bound_holds_across_programs_too_short_for_a_collector(tmp_path: Path) -> None:
    """Each claims what it writes, and the rest goes back at its end."""
    root, size = tmp_path / "root", 4 * PROMPT_BYTES
    for number in range(8):
        with kvstore.open(root, max_bytes=size) as store:
            put(store, number)
    assert size // 2 < prompts(root) * LAYOUT.chunk_bytes <= size


def test_a_store_that_only_reads_starts_nothing(tmp_path: Path, at_once: None) -> None:
    with kvstore.open(tmp_path / "root") as store:
        assert matched(store, 1) == 0 and not store.stats()["collecting"]
    assert "kvstore-collecting" not in {thread.name for thread in threading.enumerate()}


def test_the_collector_takes_one_core_at_most_while_it_starts(tmp_path: Path, at_once: None) -> None:
    root = tmp_path / "root"
    with kvstore.open(root, shard_bits=2) as store:
        put(store, 0)
        environment = Path(f"/proc/{collector(root)}/environ").read_bytes().split(b"\0")
        assert b"OPENBLAS_NUM_THREADS=1" in environment


def test_the_smallest_bound_counts_while_its_process_lives(tmp_path: Path, at_once: None) -> None:
    root = tmp_path / "root"
    with kvstore.open(root, max_bytes=1 << 30, shard_bits=2) as large:
        put_until(large, lambda: prompts(root) * LAYOUT.chunk_bytes > 8 * MIB)
        eventually(lambda: large.stats()["collecting"], "the larger one runs the collector")
        with writing(root, max_bytes=4 * MIB):
            eventually(lambda: prompts(root) * LAYOUT.chunk_bytes < 4 * MIB, "the smaller bound is kept")


def test_what_is_held_or_pinned_stays(tmp_path: Path, at_once: None) -> None:
    with kvstore.open(tmp_path / "root", max_bytes=BOUND_BYTES // 4, shard_bits=2) as store:
        cache = store.namespace("model", LAYOUT)
        for number in (-1, -2):
            cache.put(tokens(1, -number), kv())
        pin = cache.pin(tokens(1, 1), ttl=3600)
        with cache.hold(tokens(1, 2)) as hold:
            put_until(store, lambda: store.stats()["bytes_written"] > BOUND_BYTES)
            assert hold.tokens == TOKENS_COUNT and len(hold.view()) == CHUNKS
        written = store.stats()["bytes_written"]
        put_until(store, lambda: store.stats()["bytes_written"] > written + BOUND_BYTES // 2)
        assert cache.match(tokens(1, 1)) == pin.tokens == TOKENS_COUNT


def test_the_time_to_live_of_a_process_counts_at_the_collector_of_another(tmp_path: Path, at_once: None) -> None:
    root = tmp_path / "root"
    with kvstore.open(root) as store:
        put(store, 1)
        for path in (root / "chunks").glob("*/*"):
            os.utime(path, (0, time.time() - 7200))
        eventually(lambda: store.stats()["collecting"])
        with kvstore.open(root, max_bytes=None, ttl=3600) as other:
            other.namespace("other", LAYOUT).put(tokens(0, 2), kv())
            command = [sys.executable, "-m", "kvstore_gc", "--nice", "0", "--root", str(root), "--once"]

            def is_gone() -> bool:
                subprocess.run(command, check=False)  # perhaps both take some, and one ends before the other
                return prompts(root) == CHUNKS

            eventually(is_gone, "what was not used for so long goes")


@pytest.mark.slow
def test_collector_without_server_extra_keeps_the_bound(
    tmp_path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process cannot import a package that `pip install .` does not install."""
    for name in ("click", "rich", "prometheus_client", "grpc_health", "grpc_reflection", "starlette", "uvicorn"):
        (tmp_path / f"{name}.py").write_text("raise ModuleNotFoundError(__name__)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with kvstore.open(tmp_path / "root", max_bytes=BOUND_BYTES, shard_bits=2) as store:
        put_until(store, lambda: store.stats()["bytes_written"] > 2 * BOUND_BYTES)
        assert prompts(tmp_path / "root") * LAYOUT.chunk_bytes <= BOUND_BYTES


# The default, and where there is none


def test_the_default_is_named_and_the_same_for_all_and_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "kvstore")
    root = tmp_path / "root"
    kvstore.open(root, max_bytes=None).close()
    with kvstore.open(root) as store:
        chosen = int(store.stats()["bound_bytes"])
        assert f"max_bytes={chosen}" in caplog.text and caplog.text.count("bound.default") == 1
        assert json.loads((root / BOUND).read_text()) == {"max_bytes": chosen}
        monkeypatch.setattr(bound, "FREE_SHARE", 0.1)
        with kvstore.open(root) as other:
            assert other.stats()["bound_bytes"] == chosen
    with kvstore.open(root) as again:
        assert again.stats()["bound_bytes"] == chosen
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert chosen == pytest.approx(0.5 * free, rel=0.5)


def test_a_default_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    kvstore.open(tmp_path / "root").close()
    (tmp_path / "root" / BOUND).write_text("a lot")
    with pytest.raises(RootMismatch, match=r'the file bound begins with .*expected \{"max_bytes": BYTES\}'):
        kvstore.open(tmp_path / "root")


def test_without_a_bound_nobody_collects(tmp_path: Path, at_once: None) -> None:
    root = tmp_path / "root"
    with kvstore.open(root, max_bytes=None) as store:
        for number in range(10):
            put(store, number)
        assert store.stats()["bound_bytes"] == 0 and not store.stats()["collecting"]
    assert prompts(root) == 10 * CHUNKS and collectors(root) == []


def test_a_root_without_metadata_keeps_its_bound(tmp_path: Path, at_once: None) -> None:
    root = tmp_path / "root"
    with kvstore.open(root, max_bytes=4 * MIB, shard_bits=2) as store:
        put(store, 0)
        for path in root.glob(f"{METADATA}*"):
            path.unlink()
        eventually(lambda: not store.stats()["protected"], "its session is lost")
        with pytest.raises(Overloaded, match="fsck ROOT --adopt"):
            for number in range(1, 1000):
                put(store, number, required=True)
        assert prompts(root) * LAYOUT.chunk_bytes <= 4 * MIB and matched(store, 0) == TOKENS_COUNT


@for_each("asked", [{"max_bytes": 1 << 30}, {"ttl": 60}])
def test_where_processes_cannot_share_a_bound_is_refused(
    tmp_path: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for root, etcd in (("memory://", None), (str(tmp_path / "root"), "127.0.0.1:1")):
        with pytest.raises(InvalidRequest, match=r"kvstore-gc --root .* --etcd"):
            kvstore.open(root, etcd, **asked)
    monkeypatch.setattr(host, "_file_system", lambda folder: 0x6969)
    with pytest.raises(InvalidRequest, match=r"NFS.*kvstore-gc --root"):
        kvstore.open(tmp_path / "root", **asked)
    kvstore.open(tmp_path / "root").close()


@for_each("asked", [{"max_bytes": "64MiB"}, {"max_bytes": 1000}, {"max_bytes": True}, {"ttl": 0}])
def test_a_bound_that_makes_no_sense_is_refused(tmp_path: Path, asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"max_bytes=|ttl="):
        kvstore.open(tmp_path / "root", **asked)


def test_a_put_that_is_larger_than_the_bound_is_refused(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "root", max_bytes=MIB) as store:
        cache = store.namespace("model", LAYOUT)
        prompt = list(range(5 * LAYOUT.chunk_tokens))
        values = np.ones(LAYOUT.shape(len(prompt)), np.int8)
        with pytest.raises(Overloaded, match=r"has [\d.]+ MiB, and max_bytes .* leaves room for 972.80 KiB: put less"):
            cache.put(prompt, values, required=True)
        with pytest.raises(Overloaded, match="put less at once"):
            cache.blocks.put([bytes(32)], [bytes(MIB + 1)], required=True)
        part = 2 * LAYOUT.chunk_tokens
        assert cache.put(prompt[:part], values[:, :, :part]).tokens_present == part


def test_a_disk_that_is_full_before_the_bound_starts_the_collector_at_once(
    volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is never near, nor is the time at which a collector begins by itself."""
    monkeypatch.setattr(collecting, "START_S", float(NEVER))
    with kvstore.open(volume / "root", max_bytes=1 << 40, shard_bits=2) as store:
        with pytest.raises(Overloaded, match=r"No space left .*this store makes room by itself") as refused:
            for number in range(10 * 8 * BOUND_BYTES // PROMPT_BYTES):
                put(store, number, required=True)
        assert "kvstore-gc" not in str(refused.value)
        eventually(lambda: store.stats()["collecting"], "a collector runs")
        stored = store.stats()["bytes_written"]
        put_until(store, lambda: store.stats()["bytes_written"] > stored + BOUND_BYTES)
        assert store.stats()["protected"], "puts left room for the metadata"


def test_a_new_store_on_a_full_disk_makes_room(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first put does not take the room that the collector needs."""
    root = volume / "root"
    with kvstore.open(root, max_bytes=1 << 40, shard_bits=2) as store:
        for number in range(BOUND_BYTES // PROMPT_BYTES):
            put(store, number)
    fill(volume / "other")
    monkeypatch.setattr(collecting, "START_S", float(NEVER))
    with kvstore.open(root, max_bytes=1 << 40) as store:
        with pytest.raises(Overloaded, match="this store makes room by itself"):
            put(store, 1000, required=True)
        put_until(store, lambda: store.stats()["bytes_written"] > PROMPT_BYTES)


def test_a_collector_is_elected_though_the_disk_has_no_room_for_metadata(
    volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reserve is spent before the election, which is a write."""
    monkeypatch.setattr(collecting, "START_S", float(NEVER))
    root = volume / "root"
    with kvstore.open(root, max_bytes=1 << 40, shard_bits=2) as store:
        for number in range(BOUND_BYTES // PROMPT_BYTES):
            put(store, number)
        with closing(sqlite3.connect(root / METADATA)) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # its log has to grow again
        fill(volume / "other")
        stored = store.stats()["bytes_written"]
        put_until(store, lambda: store.stats()["bytes_written"] > stored + PROMPT_BYTES)


def test_a_full_disk_and_no_bound_says_what_helps(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetadataFile, "shortened", lambda self, timeout_s: False)  # there is no room in the log either
    with kvstore.open(volume / "root", max_bytes=None, shard_bits=2) as store:
        put(store, 0)
        fill(volume / "other")
        with pytest.raises(Overloaded, match=r"max_bytes=None.*kvstore-gc --root"):
            put(store, 1, required=True)
        with pytest.raises(Overloaded, match=r"max_bytes=None.*kvstore-gc --root"):
            store.namespace("another", LAYOUT)


def test_a_disk_that_was_full_before_any_collector_ran_is_emptied_by_one_command(volume: Path) -> None:
    root = volume / "root"
    with kvstore.open(root, max_bytes=None, shard_bits=2) as store:
        for number in range(5):
            put(store, number)
    fill(volume / "other")
    command = [
        sys.executable,
        "-m",
        "kvstore_gc",
        "--nice",
        "0",
        "--root",
        str(root),
        "--once",
        "--max-bytes",
        str(PROMPT_BYTES),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert prompts(root) < CHUNKS


def test_a_full_disk_without_a_reserve_says_what_helps(volume: Path) -> None:
    root = volume / "root"
    with kvstore.open(root, max_bytes=None, shard_bits=2) as store:
        put(store, 1)
    (root / RESERVE).unlink()
    fill(volume / "other")
    command = [sys.executable, "-m", "kvstore_gc", "--nice", "0", "--root", str(root), "--once", "--max-bytes", "1MiB"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "disk" in done.stderr and "(kvstore-gc" not in done.stderr
