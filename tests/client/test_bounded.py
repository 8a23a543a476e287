"""Embedded stores with a limit: their processes never write above it together, and one of them runs a collector."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.engine import host
from kvstore.errors import InvalidRequest, Overloaded, RootMismatch
from kvstore.format.places import BOUND, RESERVE
from kvstore.host import tables
from kvstore.root import identity
from tests.kit.cases import for_each
from tests.kit.host_process import LARGE, LARGE_CHUNKS, PROMPT_BYTES, large_kv, large_tokens
from tests.kit.hosts import (
    LIMIT_BYTES,
    MIB,
    RECORDS_BYTES,
    Gauge,
    chunks_count,
    collectors,
    neighbours,
    put_large,
    put_until,
    used_bytes,
)
from tests.kit.patience import NEVER_S, eventually
from tests.kit.programs import ended

TOKENS_COUNT = LARGE_CHUNKS * LARGE.chunk_tokens
ONCE = [sys.executable, "-m", "kvstore_gc", "--once", "--root"]


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A separate file system: its used bytes are one number, where a walk would count moved files twice."""
    mount = tmp_path / "volume"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={8 * LIMIT_BYTES}", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first put starts a collector, in a store with a limit."""
    monkeypatch.setattr(host, "COLLECTS_AFTER_S", 0.0)


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """No collector starts unless room is short."""
    monkeypatch.setattr(host, "COLLECTS_AFTER_S", NEVER_S)


def fill(other: Path) -> None:
    """Leaves not a byte free on the file system of this file."""
    with open(other, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def written(store: kvstore.Store) -> int:
    return int(store.stats()["bytes_written"])


# The limit


@pytest.mark.slow
def test_fast_writers_stay_below_the_limit(volume: Path) -> None:
    root, enough = volume / "root", 2 * LIMIT_BYTES // PROMPT_BYTES
    with Gauge(volume) as gauge, neighbours(root, "writes", 2, LIMIT_BYTES) as writers:
        eventually(lambda: sum(each.stats()[1] for each in writers) > enough, "twice the limit is written")
        eventually(lambda: len(collectors(root)) == 1, "of those that start one each, one collects")
        for each in writers:
            each.end()
    assert LIMIT_BYTES // 2 < gauge.most <= LIMIT_BYTES + RECORDS_BYTES, gauge.most
    assert collectors(root) == []


@pytest.mark.slow
def test_killed_writers_and_collectors_stay_below_the_limit(volume: Path) -> None:
    root, some = volume / "root", LIMIT_BYTES // PROMPT_BYTES
    with Gauge(volume) as gauge:
        for _ in range(3):
            with neighbours(root, "writes", 2, LIMIT_BYTES) as writers:
                eventually(lambda ws=writers: sum(each.stats()[1] for each in ws) > some)  # type: ignore[misc]
                for pid in collectors(root):
                    os.kill(pid, signal.SIGKILL)
                writers[0].kill()
                before = writers[1].stats()[1]
                eventually(lambda w=writers[1], n=before: w.stats()[1] > n + 4)  # type: ignore[misc]
                writers[1].end()
    # A put of a killed process may have written one file that nobody counted before the next listing.
    assert LIMIT_BYTES // 2 < gauge.most <= LIMIT_BYTES + RECORDS_BYTES + 3 * PROMPT_BYTES, gauge.most


def test_short_programs_stay_below_the_limit(tmp_path: Path) -> None:
    root, size = tmp_path / "root", 8 * PROMPT_BYTES
    for number in range(12):
        with kvstore.open(root, max_bytes=size, shard_bits=2) as store:
            put_large(store, number)
        assert used_bytes(root) <= size
    assert used_bytes(root) > size // 2


def test_a_store_without_a_limit_collects_nothing(tmp_path: Path, soon: None) -> None:
    root = tmp_path / "root"
    with kvstore.open(root, max_bytes=None) as store:
        for number in range(10):
            put_large(store, number)
        assert store.stats()["bound_bytes"] == 0 and not store.stats()["collecting"]
    assert chunks_count(root) == 10 * LARGE_CHUNKS and collectors(root) == []


def test_held_and_pinned_chunks_stay_in_a_full_store(tmp_path: Path, soon: None) -> None:
    with kvstore.open(tmp_path / "root", max_bytes=LIMIT_BYTES // 4, shard_bits=2) as store:
        cache = store.namespace("large", LARGE)
        for writer in (1, 2):
            cache.put(large_tokens(writer, 0), large_kv())
        pin = cache.pin(large_tokens(1, 0), ttl=3600)
        with cache.hold(large_tokens(2, 0)) as hold:
            put_until(store, lambda: written(store) > LIMIT_BYTES)
            assert hold.tokens == TOKENS_COUNT and len(hold.view()) == LARGE_CHUNKS
        before = written(store)
        put_until(store, lambda: written(store) > before + LIMIT_BYTES // 2)
        assert cache.match(large_tokens(1, 0)) == pin.tokens == TOKENS_COUNT
        assert cache.match(large_tokens(2, 0)) == 0


def test_a_store_with_everything_held_refuses_puts(tmp_path: Path, soon: None) -> None:
    with kvstore.open(tmp_path / "root", max_bytes=4 * PROMPT_BYTES, shard_bits=2) as store:
        cache = store.namespace("large", LARGE)
        holds: list[kvstore.Hold] = []
        reason = ""
        while reason != "full":  # "overload" while the collector starts
            reason = cache.put(large_tokens(0, len(holds)), large_kv()).reason
            if not reason:
                holds.append(cache.hold(large_tokens(0, len(holds))))
        assert len(holds) >= 3 and used_bytes(tmp_path / "root") <= 4 * PROMPT_BYTES
        with pytest.raises(Overloaded, match="nothing can be evicted at the moment"):
            cache.put(large_tokens(0, len(holds)), large_kv(), required=True)


# The default, and what is refused


def test_the_default_limit_is_logged_and_the_same_for_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "kvstore")
    root = tmp_path / "root"
    kvstore.open(root, max_bytes=None).close()
    with kvstore.open(root) as store:
        chosen = int(store.stats()["bound_bytes"])
        assert f"max_bytes={chosen}" in caplog.text and caplog.text.count("bound.default") == 1
        assert json.loads((root / BOUND).read_text()) == {"max_bytes": chosen}
        monkeypatch.setattr(identity, "FREE_SHARE", 0.1)
        with kvstore.open(root) as other:
            assert other.stats()["bound_bytes"] == chosen
    with kvstore.open(root) as again:
        assert again.stats()["bound_bytes"] == chosen
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert chosen == pytest.approx(0.5 * free, rel=0.5)


def test_an_invalid_default_limit_is_an_error(tmp_path: Path) -> None:
    kvstore.open(tmp_path / "root").close()
    (tmp_path / "root" / BOUND).write_text("a lot")
    with pytest.raises(RootMismatch, match=r'the file bound begins with .*expected \{"max_bytes": BYTES\}'):
        kvstore.open(tmp_path / "root")


@for_each("asked", [{"max_bytes": 1 << 30}, {"ttl": 60}])
def test_a_limit_where_no_folder_is_shared_is_an_error(
    tmp_path: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for root, etcd in (("memory://", None), (str(tmp_path / "root"), "127.0.0.1:1")):
        with pytest.raises(InvalidRequest, match=r"kvstore-gc --root .* --etcd"):
            kvstore.open(root, etcd, **asked)
    monkeypatch.setattr(tables, "_file_system", lambda folder: 0x6969)
    with pytest.raises(InvalidRequest, match=r"other hosts may write.*kvstore-gc --root"):
        kvstore.open(tmp_path / "root", **asked)
    kvstore.open(tmp_path / "root").close()


def test_a_put_larger_than_the_limit_is_refused(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "root", max_bytes=MIB) as store:
        cache = store.namespace("large", LARGE)
        prompt = list(range(9 * LARGE.chunk_tokens))
        values = np.ones(LARGE.shape(len(prompt)), np.int8)
        with pytest.raises(
            Overloaded, match=r"has [\d.]+ MiB, and the store has room for 1.00 MiB: put less at a time"
        ):
            cache.put(prompt, values, required=True)
        with pytest.raises(Overloaded, match="put less at a time"):
            cache.blocks.put([bytes(32)], [bytes(MIB + 1)], required=True)
        part = 2 * LARGE.chunk_tokens
        assert cache.put(prompt[:part], values[:, :, :part]).tokens_present == part


# A full disk


def test_a_disk_smaller_than_the_limit_refuses_no_put(volume: Path) -> None:
    with kvstore.open(volume / "root", max_bytes=1 << 40, shard_bits=2) as store:
        for number in range(10 * 8 * LIMIT_BYTES // PROMPT_BYTES):
            put_large(store, number, required=True)
        assert store.stats()["collecting"] and store.stats()["protected"]


def test_a_new_store_on_a_full_disk_makes_room(volume: Path, never: None) -> None:
    root = volume / "root"
    with kvstore.open(root, max_bytes=1 << 40, shard_bits=2) as store:
        for number in range(LIMIT_BYTES // PROMPT_BYTES):
            put_large(store, number)
    fill(volume / "other")
    with kvstore.open(root, max_bytes=1 << 40) as store:
        assert store.stats()["protected"] and store.namespace("large", LARGE).match(large_tokens(0, 0)) == TOKENS_COUNT
        put_until(store, lambda: written(store) > PROMPT_BYTES)


def test_a_full_disk_without_a_limit_names_what_helps(volume: Path) -> None:
    with kvstore.open(volume / "root", max_bytes=None, shard_bits=2) as store:
        put_large(store, 0)
        fill(volume / "other")
        with pytest.raises(Overloaded, match=r"No space left .*max_bytes="):
            put_large(store, 1, required=True)
        with pytest.raises(Overloaded, match=r"No space left .*max_bytes="):
            store.namespace("another", LARGE)


@pytest.mark.parametrize("reserve", ["kept", "spent"])
def test_a_full_disk_is_emptied_by_one_command(volume: Path, reserve: str) -> None:
    root = volume / "root"
    with kvstore.open(root, max_bytes=None, shard_bits=2) as store:
        for number in range(5):
            put_large(store, number)
    if reserve == "spent":
        (root / RESERVE).unlink()
    fill(volume / "other")
    done = ended(*ONCE, str(root), "--max-bytes", "1MiB")
    assert done.returncode == 0 and used_bytes(root) <= MIB, done.stderr
