"""Embedded stores that bound themselves: by claims at first, then by a collector that one of the processes runs (S6).

Bytes are asserted, never times: a node stops by itself until a collector has counted what it wrote.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.client.store import Store
from kvstore.errors import InvalidRequest, Overloaded, RootMismatch
from kvstore.format.places import BOUND, METADATA, METADATA_LOGS, RESERVE
from kvstore.meta.sqlite import host
from kvstore.node import collecting
from kvstore.root import bound
from kvstore.root.reserve import RESERVE_BYTES
from tests.client.bound_process import CHUNKS, LAYOUT, PROMPT_BYTES, kv, tokens
from tests.patience import PATIENCE_S, eventually, returns

MIB = 1 << 20
BOUND_BYTES = 16 * MIB
RECORDS_BYTES = RESERVE_BYTES + (512 << 10)
"""The reserve, plans, small records in pages: nobody counts them."""
TOKENS_COUNT = CHUNKS * LAYOUT.chunk_tokens
NEVER = "3600"


class Writer:
    """A process of ``bound_process``."""

    def __init__(self, root: Path, max_bytes: int | str = BOUND_BYTES, start_s: str = "0") -> None:
        command = [sys.executable, "-m", "tests.client.bound_process", str(root), str(max_bytes), start_s]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._said() == "begun"

    def stats(self) -> tuple[bool, int]:
        """Returns whether it runs the collector, and how many prompts it stored."""
        self.tell("stats")
        is_collecting, stored = self._said().split()
        return is_collecting == "1", int(stored)

    def tell(self, what: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(f"{what}\n")
        self.child.stdin.flush()

    def end(self) -> None:
        self.tell("end")
        assert self._said() == "done"
        assert self.child.wait(PATIENCE_S) == 0

    def _said(self) -> str:
        assert self.child.stdout is not None
        return returns(self.child.stdout.readline).strip()


@contextmanager
def writing(root: Path, count: int = 1, **options: Any) -> Iterator[list[Writer]]:
    """Processes that write as fast as they can."""
    with ExitStack() as undo:
        writers = []
        for _ in range(count):
            writer = Writer(root, **options)
            undo.callback(writer.child.communicate)
            undo.callback(writer.child.kill)
            writers.append(writer)
        yield writers


def collectors(root: Path) -> list[int]:
    """The processes of this host that run a collector for this root."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"kvstore_gc" in words and str(root).encode() in words:
            found.append(int(path.parent.name))
    return found


def prompts(root: Path) -> int:
    """The chunks on the root."""
    return sum(1 for _ in (root / "chunks").glob("*/*"))


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


class Gauge:
    """Follows the used bytes of a root on a file system of its own, without the metadata."""

    def __init__(self, mount: Path) -> None:
        self.most = 0
        self._mount = mount
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        # The last store that closes unlinks the log, and frees its bytes a moment later: not before it is closed here.
        self._logs = dict[int, int]()

    def __enter__(self) -> Gauge:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for log in self._logs.values():
            os.close(log)

    def _run(self) -> None:
        while not self._ended.wait(0.005):
            before = self._metadata_bytes()
            found = os.statvfs(self._mount)
            # The log may grow between two looks, more so on a busy machine.
            beside = max(before, self._metadata_bytes())
            self.most = max(self.most, (found.f_blocks - found.f_bfree) * found.f_frsize - beside)

    def _metadata_bytes(self) -> int:
        root, found = self._mount / "root", 0
        with suppress(FileNotFoundError):
            found += os.stat(root / METADATA).st_blocks * 512
        with suppress(FileNotFoundError):
            path = root / METADATA_LOGS[0]
            if os.stat(path).st_ino not in self._logs:
                log = os.open(path, os.O_RDONLY)
                self._logs[os.fstat(log).st_ino] = log
        return found + sum(os.fstat(log).st_blocks * 512 for log in self._logs.values())


def put(store: Store, number: int) -> None:
    store.namespace("model", LAYOUT).put(tokens(0, number), kv())


def put_until(store: Store, holds: Callable[[], bool]) -> int:
    """Puts new prompts until it holds; returns how many were stored."""
    ends_s, number = time.monotonic() + PATIENCE_S, 0
    while not holds():
        assert time.monotonic() < ends_s, "it did not happen"
        try:
            put(store, number)
            number += 1
        except Overloaded:
            time.sleep(0.01)
    return number


def matched(store: Store, number: int) -> int:
    return store.namespace("model", LAYOUT).match(tokens(0, number))


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
    assert BOUND_BYTES // 2 < gauge.most <= BOUND_BYTES + count * PROMPT_BYTES + RECORDS_BYTES, gauge.most
    assert collectors(root) == []


@pytest.mark.slow
def test_the_bound_holds_across_restarts_and_kills(volume: Path) -> None:
    root = volume / "root"
    with Gauge(volume) as gauge:
        for number in range(6):
            with writing(root, start_s=NEVER) as (writer,):
                most = BOUND_BYTES // PROMPT_BYTES // 3
                eventually(lambda writer=writer, most=most: writer.stats()[1] > most)  # type: ignore[misc]
                if number % 2:
                    writer.child.kill()
                else:
                    writer.end()
    assert BOUND_BYTES // 2 < gauge.most <= BOUND_BYTES + PROMPT_BYTES + RECORDS_BYTES, gauge.most


def test_the_bound_holds_across_programs_too_short_for_a_collector(tmp_path: Path) -> None:
    """Each claims what it writes: the rest goes back at its end, and what it wrote beyond counts."""
    root, size = tmp_path / "root", 4 * PROMPT_BYTES
    for number in range(8):
        with kvstore.open(root, max_bytes=size) as store:
            try:
                put(store, number)
            except Overloaded:
                continue
    assert size // 2 < prompts(root) * LAYOUT.chunk_bytes <= size + PROMPT_BYTES


def test_a_store_that_only_reads_starts_nothing(tmp_path: Path, at_once: None) -> None:
    with kvstore.open(tmp_path / "root") as store:
        assert matched(store, 1) == 0 and not store.stats()["collecting"]
    assert "kvstore-collecting" not in {thread.name for thread in threading.enumerate()}


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
            put_until(store, lambda: bool(store.stats()["root_full"]))
            assert hold.tokens == TOKENS_COUNT and len(hold.view()) == CHUNKS
        written = store.stats()["bytes_written"]
        put_until(store, lambda: store.stats()["bytes_written"] > written + 2 * BOUND_BYTES)
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
            command = [sys.executable, "-m", "kvstore_gc", "--root", str(root), "--once"]

            def is_gone() -> bool:
                subprocess.run(command, check=False)  # perhaps both take some, and one ends before the other
                return prompts(root) == CHUNKS

            eventually(is_gone, "what was not used for so long goes")


# One is elected, others take over


@pytest.mark.slow
def test_another_takes_over_from_a_killed_process_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with writing(root, 2) as writers:
        eventually(lambda: any(each.stats()[0] for each in writers), "one is elected")
        first, second = sorted(writers, key=lambda each: not each.stats()[0])
        (before,) = collectors(root)
        first.child.kill()
        eventually(lambda: before not in collectors(root), "the child ends with its parent")
        eventually(lambda: second.stats()[0] and len(collectors(root)) == 1, "the other one takes over")
        stored = second.stats()[1]
        eventually(lambda: second.stats()[1] > stored + BOUND_BYTES // PROMPT_BYTES, "it goes on making room")


@pytest.mark.slow
def test_another_takes_over_from_a_process_that_was_stopped_past_its_lease(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with writing(root, 2) as writers:
        eventually(lambda: any(each.stats()[0] for each in writers), "one is elected")
        first, second = sorted(writers, key=lambda each: not each.stats()[0])
        stopped = [first.child.pid, *collectors(root)]
        try:
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            eventually(lambda: second.stats()[0], "the other one takes over")
            stored = second.stats()[1]
            eventually(lambda: second.stats()[1] > stored + BOUND_BYTES // PROMPT_BYTES, "it makes room")
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        eventually(lambda: not first.stats()[0] and len(collectors(root)) == 1, "the first one's child ends")


def test_a_collector_that_hangs_is_replaced(tmp_path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    with kvstore.open(root) as store:
        put(store, 1)
        eventually(lambda: store.stats()["collecting"])
        (before,) = collectors(root)
        os.kill(before, signal.SIGSTOP)
        monkeypatch.setattr(collecting, "HUNG_S", 0.0)
        eventually(lambda: before not in collectors(root), "it is killed")
        monkeypatch.undo()
        eventually(lambda: collectors(root), "another is started")


# Nothing is left


def test_no_collector_is_left_after_close(tmp_path: Path, at_once: None) -> None:
    root = tmp_path / "root"
    with kvstore.open(root) as store:
        put(store, 1)
        eventually(lambda: collectors(root))
    assert collectors(root) == []


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_no_collector_is_left_after_a_process_that_did_not_close(tmp_path: Path, how: str) -> None:
    root = tmp_path / "root"
    with writing(root) as (writer,):
        eventually(lambda: collectors(root))
        if how == "kill":
            writer.child.kill()
        else:
            writer.tell("exit")
        eventually(lambda: not collectors(root), "the child ends with its parent")


def test_a_program_that_ends_without_closing_leaves_its_room_to_the_next(tmp_path: Path) -> None:
    root, size = tmp_path / "root", 4 * PROMPT_BYTES
    program = (
        "import sys, kvstore\nfrom tests.client.bound_process import *\n"
        f"store = kvstore.open(sys.argv[1], max_bytes={size})\n"
        "store.namespace('model', LAYOUT).put(tokens(0, 1), kv())\n"
    )
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", program, str(root)], check=False).returncode == 0
    with kvstore.open(root, max_bytes=size) as store:
        put(store, 2)
        assert matched(store, 2) == TOKENS_COUNT and not store.stats()["collecting"]


def test_a_forked_child_leaves_the_collector_alone(tmp_path: Path, at_once: None) -> None:
    root = tmp_path / "root"
    with kvstore.open(root) as store:
        put(store, 1)
        eventually(lambda: store.stats()["collecting"])
        before = collectors(root)
        child = os.fork()
        if child == 0:
            store.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert collectors(root) == before and store.stats()["collecting"]


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


def test_a_root_without_metadata_goes_on(tmp_path: Path, at_once: None) -> None:
    root = tmp_path / "root"
    with kvstore.open(root, max_bytes=4 * MIB, shard_bits=2) as store:
        put(store, 0)
        for path in root.glob(f"{METADATA}*"):
            path.unlink()
        eventually(lambda: not store.stats()["protected"], "its session is lost")
        stored = put_until(store, lambda: prompts(root) * LAYOUT.chunk_bytes > 6 * MIB)
        assert matched(store, stored - 1) == TOKENS_COUNT


@pytest.mark.parametrize("asked", [{"max_bytes": 1 << 30}, {"ttl": 60}], ids=str)
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


@pytest.mark.parametrize(
    "asked", [{"max_bytes": "64MiB"}, {"max_bytes": 1000}, {"max_bytes": True}, {"ttl": 0}], ids=str
)
def test_a_bound_that_makes_no_sense_is_refused(tmp_path: Path, asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"max_bytes=|ttl="):
        kvstore.open(tmp_path / "root", **asked)


def test_a_disk_that_was_full_before_any_collector_ran_is_emptied_by_one_command(volume: Path) -> None:
    root = volume / "root"
    with kvstore.open(root, max_bytes=None, shard_bits=2) as store:
        for number in range(5):
            put(store, number)
    with open(volume / "other", "wb", buffering=0) as other, suppress(OSError):
        while True:
            other.write(bytes(4096))
    command = [sys.executable, "-m", "kvstore_gc", "--root", str(root), "--once", "--max-bytes", str(PROMPT_BYTES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert prompts(root) < CHUNKS


def test_a_full_disk_without_a_reserve_says_what_helps(volume: Path) -> None:
    root = volume / "root"
    with kvstore.open(root, max_bytes=None, shard_bits=2) as store:
        put(store, 1)
    (root / RESERVE).unlink()
    with open(volume / "other", "wb", buffering=0) as other, suppress(OSError):
        while True:
            other.write(bytes(4096))
    command = [sys.executable, "-m", "kvstore_gc", "--root", str(root), "--once", "--max-bytes", "1MiB"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "disk" in done.stderr and "(kvstore-gc" not in done.stderr
