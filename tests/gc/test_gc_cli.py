"""``kvstore-gc`` as people run it: what it refuses, prints and leaves alone, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import kvstore
from kvstore.meta.etcd import EtcdMetadata
from kvstore_gc.cli import command
from kvstore_gc.cycle import FRESH_S
from tests.cli.conftest import PATIENCE_S, SOURCE, Running, descendants, eventually, serving
from tests.kit.cases import for_each
from tests.kit.collecting import GC, bounded_to
from tests.kit.programs import ended

LAYOUT = kvstore.Layout(layers=2, kv_heads=1, head_dim=64, dtype="float16", chunk_tokens=4)
CHUNK_BYTES = 6144
FEW_SHARDS = ("--shard-bits", "2")
"""A round works on each shard that has victims: what these tests show needs no more than a few."""
ENOUGH = ("--root", "memory://gc", "--etcd", "127.0.0.1:1")


def called(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments), prog_name="kvstore-gc")


@for_each(
    "arguments, says",
    [
        (("--root", "memory://gc", "--once"), "give --etcd"),
        (ENOUGH, "give --once"),
        ((*ENOUGH, "--once", "--interval", "1m"), "give --once"),
        ((*ENOUGH, "--interval", "10ms"), "expected 1 s or more"),
        ((*ENOUGH, "--once", "--metrics", "127.0.0.1:0"), "--metrics is for --interval"),
        ((*ENOUGH, "--once", "--policy", "/nowhere"), "cannot read the policy"),
        ((*ENOUGH, "--once", "--ttl", "soon"), "is not a time"),
        ((*ENOUGH, "--once", "--max-bytes", "lots"), "is not a size"),
        ((*ENOUGH, "--once", "--max-bytes", "200"), "'200' is less than 1.00 MiB: write for example 200GiB"),
    ],
)
def test_wrong_use_is_said_in_one_line(arguments: tuple[str, ...], says: str) -> None:
    result = called(*arguments)
    assert result.exit_code == 2, result.output
    assert says in result.stderr and "Traceback" not in result.stderr


@for_each(
    "policy, says",
    [
        ("max_bytes = 200", "max_bytes is 200 B, under 1MiB: give a unit"),
        ('[[quota]]\ntenant = "acme"\nmax_bytes = 20', "max_bytes of tenant 'acme' is 20 B, under 1MiB"),
    ],
)
def test_a_bound_without_a_unit_is_refused_in_a_policy(policy: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(policy)
    result = called(*ENOUGH, "--once", "--policy", str(tmp_path / "policy.toml"))
    assert result.exit_code == 2 and says in result.stderr


# Real programs


def line(done: subprocess.CompletedProcess[str]) -> Any:
    """The one JSON object on standard output."""
    assert done.stdout.count("\n") == 1, done.stdout + done.stderr
    return json.loads(done.stdout)


@contextmanager
def collecting(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], Callable[[], str]]]:
    """``kvstore-gc ARGUMENTS`` until the block ends; its messages so far."""
    log = folder / f"gc-{time.monotonic_ns()}.log"
    with (
        open(log, "w") as messages,
        subprocess.Popen([*GC, *arguments], stdout=subprocess.PIPE, stderr=messages, text=True, cwd=SOURCE) as child,
    ):
        try:
            eventually(lambda: "gc.ready" in log.read_text() or child.poll() is not None, "it is ready")
            yield child, log.read_text
        finally:
            child.kill()


def tree(root: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_size if path.is_file() else -1, path.stat().st_mtime_ns) for path in root.rglob("*")
    }


def chunks(root: Path) -> int:
    return sum(1 for _ in (root / "chunks").glob("*/*"))


def put(running: Running, count: int, first: int = 0) -> None:
    """Stores this many chunks, in prompts of ten."""
    with kvstore.connect(running.grpc) as store:
        cache = store.namespace("model", LAYOUT)
        for start in range(first, first + count, 10):
            tokens = list(range(start * 100, start * 100 + 40))
            assert cache.put(tokens, np.ones(LAYOUT.shape(40), np.float16)).tokens_present == 40


@pytest.fixture(scope="module")
def up(module_root: Path) -> Iterator[Running]:
    at = ("--root", str(module_root / "root"), "--listen", "127.0.0.1:0")
    with serving(module_root, "up", *at, "--no-gc", *FEW_SHARDS) as running:
        assert len(descendants(running.child.pid)) == 2
        yield running


@pytest.fixture
def at(up: Running, module_root: Path) -> tuple[str, ...]:
    return ("--root", str(module_root / "root"), "--etcd", up.etcd)


@pytest.mark.slow
def test_a_dry_run_changes_neither_the_root_nor_etcd(up: Running, at: tuple[str, ...], module_root: Path) -> None:
    root = module_root / "root"
    put(up, 30)
    time.sleep(2 * FRESH_S)  # what was put just before a listing stays
    limit = bounded_to(15 * CHUNK_BYTES)
    meta = EtcdMetadata(up.etcd)
    try:
        before, revision = tree(root), meta.list("/kv/").revision
        as_json = line(ended(*GC, *at, "--dry-run", *limit, "--json"))
        shown = ended(*GC, *at, "--dry-run", *limit)
        assert (tree(root), meta.list("/kv/").revision) == (before, revision)
    finally:
        meta.close()
    assert as_json["dry_run"] and as_json["chosen"]["over capacity"]["chunks"] == 16
    assert as_json["namespaces"][0]["name"] == "model"
    assert shown.returncode == 0
    assert "would delete 16 chunks" in shown.stdout and "over capacity" in shown.stdout

    done = line(ended(*GC, *at, "--once", *limit, "--json"))
    assert done["reaped"]["chunks"] in (16, 17), "in slices"
    assert done["used_bytes_after"] == chunks(root) * CHUNK_BYTES <= done["target_bytes"]


@pytest.mark.slow
def test_what_cannot_be_finished_is_exit_code_1(up: Running, at: tuple[str, ...]) -> None:
    put(up, 10, first=5000)
    with kvstore.connect(up.grpc) as store:
        pin = store.namespace("model", LAYOUT).pin(list(range(500_000, 500_040)), ttl=600)
        done = ended(*GC, *at, "--once", *bounded_to(2 * CHUNK_BYTES))
        assert done.returncode == 1, done.stderr
        assert "unfinished: the root's files still take" in done.stderr and "kept: 10 chunks" in done.stdout
        pin.release()
    assert ended(*GC, *at, "--once", *bounded_to(2 * CHUNK_BYTES)).returncode == 0


@pytest.mark.slow
def test_rounds_go_on_until_sigterm(up: Running, at: tuple[str, ...], module_root: Path) -> None:
    put(up, 40, first=9000)
    arguments = ("--interval", "1s", *bounded_to(20 * CHUNK_BYTES), "--json", "--metrics", "127.0.0.1:0")
    with collecting(module_root, *at, *arguments) as (child, said):
        assert child.stdout is not None
        rounds = [json.loads(child.stdout.readline()) for _ in range(3)]
        assert rounds[0]["shards"] == 4
        eventually(lambda: chunks(module_root) <= 20, "the root is within its bound")
        where = said().split("metrics=")[1].split()[0]
        with urllib.request.urlopen(f"http://{where}/metrics", timeout=PATIENCE_S) as page:
            shown = page.read().decode()
        assert f"kvstore_gc_capacity_bytes {20 * CHUNK_BYTES}" in shown and "kvstore_gc_rounds_total" in shown
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE_S) == 0
        assert "gc.stopped" in said()
    meta = EtcdMetadata(up.etcd)
    try:
        left = [kv.key for kv in meta.list("/kv/").items if "/collectors/" in kv.key or "/condemned/" in kv.key]
        assert left == [], "it has left, and nothing is open"
    finally:
        meta.close()


@pytest.mark.slow
def test_up_keeps_the_root_below_its_limit(tmp_root: Path) -> None:
    root, limit = tmp_root / "root", 1 << 20
    at = ("--root", str(root), "--listen", "127.0.0.1:0", "--max-bytes", str(limit), *FEW_SHARDS)
    with serving(tmp_root, "up", *at) as running:
        eventually(lambda: "gc.round" in running.log.read_text(), "the first round")
        for first in range(0, 2000, 100):
            try:
                put(running, 20, first=first)
            except AssertionError:
                break  # too full for the moment: shed
        # At once, not after the interval of a minute.
        eventually(lambda: chunks(root) * CHUNK_BYTES <= 0.95 * limit, "it deletes")
        assert running.end() == 0
        assert "gc.stopped" in running.log.read_text()
