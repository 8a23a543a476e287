"""``kvstore health`` and ``ops`` against real programs: two workers, an etcd."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

import kvstore
from tests.cli.conftest import Running, eventually, parsed, serving
from tests.cli.conftest import run as run  # a fixture
from tests.kit.patience import PATIENCE_S
from tests.kit.stores import SMALL, kv_of

pytestmark = pytest.mark.slow

Run = Callable[..., Result]
TOKENS = np.arange(3 * SMALL.chunk_tokens)
TEXT = ",".join(map(str, TOKENS.tolist()))


@pytest.fixture(scope="module")
def up(module_root: Path) -> Iterator[Running]:
    """Two workers with memory on one root, shared by this module."""
    with serving(
        module_root,
        "up",
        "--root",
        str(module_root / "root"),
        "--listen",
        "127.0.0.1:0",
        "--workers",
        "2",
        "--memory",
        "64MiB",
        "--no-gc",
    ) as running:
        yield running


def workers(up: Running) -> list[str]:
    return up.grpc.split(",")


def test_health_reports_every_worker(run: Run, up: Running) -> None:
    well = parsed(run("health", "--connect", up.grpc, "--json"))["workers"]
    assert sorted(each["worker"] for each in well) == sorted(workers(up))
    assert all(each["healthy"] and each["problems"] == [] and each["calls_in_flight"] >= 0 for each in well)
    unreachable = run("health", "--connect", "127.0.0.1:9")
    assert unreachable.exit_code == 2 and "does not answer" in unreachable.stdout


def test_health_reports_a_root_that_is_gone(run: Run, up: Running, module_root: Path) -> None:
    root, away = module_root / "root", module_root / "away"
    root.rename(away)
    try:
        eventually(lambda: "does not find the root" in run("health", "--connect", up.grpc).stdout, "it is reported")
        assert run("health", "--connect", up.grpc).exit_code == 1
    finally:
        away.rename(root)
    eventually(lambda: run("health", "--connect", up.grpc).exit_code == 0, "it is back")


def test_operations_are_listed_and_cancelled_by_command(run: Run, up: Running) -> None:
    first, _ = workers(up)
    at = ("--connect", up.grpc)
    with kvstore.connect(first) as store:
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, kv_of(SMALL, TOKENS), write="through")
        begun = cache.prefetch(TOKENS)
        assert begun.wait(PATIENCE_S)
    left = run("prefetch", "m", TEXT, "--no-wait", "--connect", first).stdout.strip()
    listed = {each["id"]: each for each in parsed(run("ops", *at, "--json"))["operations"]}
    assert set(listed) == {begun.id, left} and listed[left]["kind"] == "prefetch"
    mine = listed[begun.id]
    assert (mine["state"], mine["done"], mine["worker"]) == ("done", len(TOKENS), first)
    assert mine["identity"].startswith("account:")
    assert parsed(run("ops", "cancel", begun.id, *at, "--json"))["operations"][0]["state"] == "done"
    assert f"{begun.id}  prefetch" in run("ops", *at).stdout
    unknown = run("ops", "cancel", "0123456789abcdef", *at)
    assert unknown.exit_code == 2 and "no worker has an operation" in unknown.stderr
    none = run("ops", "cancel", *at)
    assert none.exit_code == 2 and "give its id" in none.stderr


def test_worker_stopped_by_sigterm_has_written_and_stays_away(run: Run, up: Running) -> None:
    # The last one here: it takes a worker from those that the others share.
    first, second = workers(up)
    tokens = TOKENS + 1000
    with kvstore.connect(first) as store:
        cache = store.namespace("m", SMALL)
        cache.put(tokens, kv_of(SMALL, tokens), write="behind")
    listed = parsed(run("ls", "--workers", "--etcd", up.etcd, "--json"))["workers"]
    os.kill(next(each["pid"] for each in listed if each["address"] == first), signal.SIGTERM)
    eventually(lambda: "up.worker_drained" in up.log.read_text(), "up sees that it ended in good order")
    assert up.child.poll() is None
    one = run("health", "--connect", up.grpc, "--json")
    assert one.exit_code == 1
    assert {each["worker"]: each["healthy"] for each in json.loads(one.stdout)["workers"]} == {
        first: False,
        second: True,
    }
    listed = parsed(run("ls", "--workers", "--etcd", up.etcd, "--json"))["workers"]
    assert [each["address"] for each in listed] == [second]
    with kvstore.connect(second) as store:
        count, kv = store.namespace("m", SMALL).get(tokens)
    assert count == len(tokens) and kv.tobytes() == kv_of(SMALL, tokens).tobytes(), "acknowledged, so it was written"
