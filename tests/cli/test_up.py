"""``kvstore up`` and ``kvstore worker`` as real programs: what they print, how they end, what they leave."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import urllib.request
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.meta.embedded_etcd import packaged_etcd
from tests.cli.conftest import KVSTORE, PATIENCE_S, SOURCE, Run, Running, descendants, eventually, gone, parsed, serving
from tests.kit.cases import for_each
from tests.kit.etcd import frozen
from tests.kit.programs import ended

pytestmark = pytest.mark.slow

LAYOUT = kvstore.Layout(layers=2, kv_heads=1, head_dim=8, dtype="float16", chunk_tokens=4)


def kv(tokens: int) -> np.ndarray[Any, np.dtype[np.float16]]:
    return np.arange(2 * 2 * tokens * 8, dtype=np.float16).reshape(LAYOUT.shape(tokens))


def test_it_serves_ends_on_sigterm_and_leaves_only_the_root(tmp_root: Path) -> None:
    root = tmp_root / "root"
    tokens = list(range(9))
    with serving(tmp_root, "up", "--root", str(root), "--listen", "127.0.0.1:0") as running:
        assert set(running.said) == {"grpc", "etcd", "metrics"}
        programs = descendants(running.child.pid)
        assert len(programs) == 3, programs  # etcd, a worker and the garbage collector
        with kvstore.connect(running.grpc) as store:
            cache = store.namespace("model", LAYOUT)
            assert cache.put(tokens, kv(9)).tokens_present == 8
            count, got = cache.get(tokens)
            assert count == 8 and np.array_equal(got, kv(9)[:, :, :8])
        with urllib.request.urlopen(f"http://{running.said['metrics']}/metrics", timeout=PATIENCE_S) as page:
            assert b"kvstore_chunks_written_total 2.0" in page.read()
        eventually(lambda: "gc.ready" in running.log.read_text(), "the garbage collector runs")
        assert running.end() == 0
        assert running.rest() == "", "one line on standard output, nothing else"
        assert gone(programs)
        assert "gc.stopped" in running.log.read_text()
    assert list((root / "staging").iterdir()) == [], "the worker removed its staging folder"
    with kvstore.open(str(root)) as store:
        assert store.namespace("model", LAYOUT).match(tokens) == 8


def test_put_while_etcd_is_frozen_is_refused_as_overload(tmp_root: Path) -> None:
    at = ("up", "--root", str(tmp_root / "root"), "--listen", "127.0.0.1:0", "--max-bytes", "256MiB")
    large = kvstore.Layout(layers=16, kv_heads=8, head_dim=128, dtype="float16", chunk_tokens=16)
    array = np.ones(large.shape(64), np.float16)
    with serving(tmp_root, *at) as running, kvstore.connect(running.grpc) as store:
        cache = store.namespace("model", large)
        assert cache.put(range(64), array).reason == ""
        (etcd,) = (pid for pid, command in descendants(running.child.pid).items() if "etcd" in command.split()[0])
        with frozen(etcd):
            reasons = (cache.put(range(start, start + 64), array).reason for start in range(1000, 9000, 100))
            assert next(filter(None, reasons)) == "overload", "its credit is used up, and the root has space"
            assert cache.match(range(64)) == 64
        eventually(lambda: cache.put(range(64, 128), array).reason == "", "puts are stored again")


@pytest.mark.parametrize("kept", [False, True], ids=["no folder", "an empty folder"])
def test_up_after_its_root_was_deleted_starts_anew(tmp_root: Path, kept: bool) -> None:
    root = tmp_root / "root"
    at = ("up", "--root", str(root), "--listen", "127.0.0.1:0")
    with serving(tmp_root, *at):
        pass
    shutil.move(root, tmp_root / "before")
    if kept:
        root.mkdir()
    with serving(tmp_root, *at) as running, kvstore.connect(running.grpc) as store:
        assert "up.root_replaced" in running.log.read_text()
        assert store.namespace("model", LAYOUT).put(range(9), kv(9)).tokens_present == 8
    shutil.rmtree(root)
    shutil.move(tmp_root / "before", root)
    with serving(tmp_root, *at) as running, kvstore.connect(running.grpc) as store:
        assert store.namespace("model", LAYOUT).match(range(9)) == 0


def test_up_with_an_etcd_that_can_lose_writes_warns(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = ("up", "--root", str(tmp_root / "root"), "--listen", "127.0.0.1:0")
    program = packaged_etcd()
    (tmp_root / "bin").mkdir()
    script, path = tmp_root / "bin" / "etcd", f"{tmp_root}/bin:{os.environ['PATH']}"
    for version, warned in (("3.5.1", True), ("3.5.9", False)):
        script.write_text(f"#!/bin/sh\n[ $1 = --version ] && exec echo 'etcd Version: {version}'\nexec {program} $@\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", path)
        with serving(tmp_root, *at) as running:
            assert ("up.unsafe_etcd" in running.log.read_text()) == warned


def test_the_first_puts_after_a_crash_stay_within_the_bound(tmp_root: Path) -> None:
    """The word of the collector that was killed stays in etcd until its lease ends, and binds nobody then."""
    bound, block = 24 << 20, 1 << 20
    root = tmp_root / "root"
    at = ("--root", str(root), "--listen", "127.0.0.1:0", "--workers", "2", "--max-bytes", str(bound))
    for crash in range(2):
        with serving(tmp_root, "up", *at) as running, kvstore.connect(running.grpc) as store:
            blocks = store.namespace("model", LAYOUT).blocks
            for number in range(bound // block + 4):
                blocks.put([(100 * crash + number).to_bytes(32)], [os.urandom(block)])
                with suppress(FileNotFoundError):
                    files = [each.stat().st_size for each in (root / "chunks").rglob("*") if each.is_file()]
                    assert sum(files) <= bound + bound // 8, "the capacity, and the credits of all nodes"
            for pid in (running.child.pid, *descendants(running.child.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@for_each("number", [signal.SIGINT, signal.SIGTERM])
@for_each("name", ["dashboard", "events"])
def test_a_signal_while_it_waits_for_a_program_is_no_failure(tmp_path: Path, name: str, number: signal.Signals) -> None:
    address = {"dashboard": "127.0.0.1:0", "events": "tcp://127.0.0.1:0"}[name]
    at = ("--root", str(tmp_path / "root"), "--listen", "127.0.0.1:0", "--etcd-folder", str(tmp_path / "etcd"))
    with subprocess.Popen(
        [*KVSTORE, "up", *at, f"--{name}", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=SOURCE,
    ) as child:
        try:
            assert child.stderr is not None
            begun = any(f"up.starting name={name}" in line for line in child.stderr)
            child.send_signal(number)
            out, said = child.communicate(timeout=PATIENCE_S)
        finally:
            child.kill()
    assert begun and out == "" and "before it was ready" not in said, said
    assert child.returncode == (130 if number == signal.SIGINT else 0), said
    assert said.endswith("Aborted!\n") == (number == signal.SIGINT), said


def test_children_die_with_it_even_when_it_is_killed(tmp_root: Path) -> None:
    at = ("--root", str(tmp_root / "root"), "--listen", "127.0.0.1:0", "--workers", "2", "--drain", "2s")
    with serving(tmp_root, "up", *at) as running:
        programs = descendants(running.child.pid)
        assert len(programs) == 4, programs  # etcd, two workers and the garbage collector
        running.end(signal.SIGKILL)
        eventually(lambda: gone(programs), "etcd, workers and the collector end after their parent was killed")


def test_killed_worker_and_collector_are_started_again(tmp_root: Path) -> None:
    def found() -> dict[str, int]:
        commands = descendants(running.child.pid).items()
        return {name: pid for pid, command in commands for name in (" worker ", "kvstore_gc") if name in command}

    def serves() -> bool:
        again = found()
        if len(again) < 2 or {*again.values()} & {*before.values()}:
            return False
        with kvstore.connect(running.grpc) as store, suppress(kvstore.errors.Unavailable):
            store.namespace("model", LAYOUT)
            return True
        return False

    with serving(tmp_root, "up", "--root", str(tmp_root / "root"), "--listen", "127.0.0.1:0") as running:
        before = found()
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        eventually(serves, "both are started again, the worker at its address")
        assert running.end() == 0


def test_the_bundled_etcd_is_started_again_with_what_it_knew(tmp_root: Path) -> None:
    with serving(tmp_root, "up", "--root", str(tmp_root / "root"), "--listen", "127.0.0.1:0") as running:
        with kvstore.connect(running.grpc) as store:
            cache = store.namespace("model", LAYOUT)
            cache.put(list(range(4)), kv(4))
            pin = cache.pin(list(range(4)), ttl=3600)
        (pid,) = [pid for pid, command in descendants(running.child.pid).items() if "--data-dir" in command]
        subprocess.run(["kill", "-KILL", str(pid)], check=True)

        def knows() -> bool:
            with kvstore.connect(running.grpc) as store:
                try:
                    return [each.id for each in store.pins()] == [pin.id]
                except kvstore.errors.Unavailable:
                    return False

        eventually(knows, "etcd is back, with the pin")
        assert running.end() == 0


def test_second_up_on_one_root_is_refused(tmp_root: Path) -> None:
    at = ("--root", str(tmp_root / "root"), "--listen", "127.0.0.1:0", "--etcd-folder", str(tmp_root / "etcd"))
    with serving(tmp_root, "up", *at):
        for folder in ("etcd", "elsewhere"):
            refused = ended(*KVSTORE, "up", *at[:-1], str(tmp_root / folder))
            assert refused.returncode == 2 and "another kvstore up uses" in refused.stderr
            assert "Traceback" not in refused.stderr


@for_each("option", ["--listen", "--metrics", "--dashboard", "--events"])
def test_port_in_use_ends_up_and_all_that_was_started(tmp_root: Path, option: str) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        at = ("--root", str(tmp_root / "root"), "--etcd-folder", str(tmp_root / "etcd"), "--listen", "127.0.0.1:0")
        done = ended(*KVSTORE, "up", *at, option, f"tcp://{address}" if option == "--events" else address)
    assert (done.returncode, done.stdout) == (2, "")
    assert address in done.stderr and "Traceback" not in done.stderr
    assert not any(str(tmp_root) in command for command in descendants(1).values())


@for_each("command", ["up", "worker"])
def test_etcd_that_does_not_answer_is_named_and_nothing_is_left(tmp_root: Path, command: str) -> None:
    at = ("--root", str(tmp_root / "root"), "--etcd", "127.0.0.1:1", "--listen", "127.0.0.1:0")
    done = ended(*KVSTORE, command, *at)
    assert done.returncode == 2
    assert "etcd at 127.0.0.1:1 did not answer" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_root.iterdir()) == []


# One cluster of two workers, shared by what follows.


def test_commands_reach_workers_directly_or_through_etcd(run: Run, up: Running, module_root: Path) -> None:
    tokens = ",".join(map(str, range(100, 112)))
    with kvstore.connect(*up.grpc.split(",")) as store:
        store.namespace("by-hand", LAYOUT).put(list(range(100, 112)), kv(12))
    for at in (("--connect", up.grpc), ("--etcd", up.etcd)):
        assert parsed(run("match", "by-hand", tokens, *at, "--json"))["tokens_matched"] == 12
        assert "by-hand" in [each["name"] for each in parsed(run("ls", *at, "--json"))["namespaces"]]
        # A worker looks at the root's room now and then, and for the first time soon after its start.
        eventually(lambda at=at: "root_total_bytes" in parsed(run("stats", *at, "--json")), "the room is known")  # type: ignore[misc]
        stats = parsed(run("stats", *at, "--json"))
        assert stats["workers"] == 2 and stats["chunks_written"] >= 3
        assert stats["root_total_bytes"] == shutil.disk_usage(module_root).total, (
            "of one root, not once for each worker"
        )
    shown = run("stats", "--connect", up.grpc).stdout
    assert "chunks_written" in shown and "chunks this node published" in shown
    assert "--all prints them" in shown and "quarantined" not in shown
    every = run("stats", "--connect", up.grpc, "--all").stdout
    assert "quarantined" in every


def test_fsck_beside_a_cluster_knows_who_lives_and_tells_etcd(run: Run, up: Running, module_root: Path) -> None:
    assert parsed(run("fsck", str(module_root / "root"), "--etcd", up.etcd, "--json"))["metadata"] is None
    found = parsed(run("fsck", str(module_root / "root"), "--etcd", up.etcd, "--adopt", "--json"))
    assert found["clean"] is True
    assert found["adopted"]["added_count"] == 0
    assert found["adopted"]["sessions_count"] >= 1
    # Their sessions were ended: they are listed again once they have noticed. Reads meanwhile may be misses.
    listed = ("ls", "--workers", "--etcd", up.etcd, "--json")
    eventually(lambda: len(parsed(run(*listed))["workers"]) == 2, "both workers are listed")


WIDE = kvstore.Layout(layers=2, kv_heads=2, head_dim=32, dtype="float16", chunk_tokens=16)
CHUNKS = 400


def test_w3_sigterm_right_after_a_put_behind_loses_nothing(tmp_root: Path, run: Run) -> None:
    root, disk = tmp_root / "root", tmp_root / "disk"
    tokens = np.arange(CHUNKS * WIDE.chunk_tokens)
    kv = np.random.default_rng(1).standard_normal(WIDE.shape(len(tokens)), np.float32).astype(np.float16)
    at = ("--root", str(root), "--listen", "127.0.0.1:0", "--memory", "32MiB", "--disk", f"{disk}:64MiB")
    with serving(tmp_root, "up", *at) as running:
        with kvstore.connect(running.grpc) as store:
            cache = store.namespace("model", WIDE)
            assert cache.put(tokens, kv).tokens_present == len(tokens)
            count, got = cache.get(tokens)
            assert count == len(tokens) and np.array_equal(got, kv)
            eventually(lambda: store.stats()["memory_bytes"] == kv.nbytes, "the worker hears what was read")
            assert store.stats()["memory_hits"] == CHUNKS
        said = run("stats", "--connect", running.grpc).stdout
        assert "memory_hits" in said and "memory_bytes" in said
        assert running.end() == 0
    assert os.listdir(root / "staging") == []
    with kvstore.open(str(root)) as store:
        count, got = store.namespace("model", WIDE).get(tokens)
        assert count == len(tokens) and np.array_equal(got, kv)
