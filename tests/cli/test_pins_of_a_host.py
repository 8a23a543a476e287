"""Commands about the pins of a root: on a root of one host, in etcd, or not known."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.core.clock import RandomIds, SystemClock
from kvstore.format.header import Generation
from kvstore.root.identity import publish
from kvstore.root.open import open_root
from tests.cli.conftest import Run, parsed
from tests.kit.workers import serving

LAYOUT = kvstore.Layout(layers=1, kv_heads=1, head_dim=8, dtype="int8", chunk_tokens=4)
TOKENS = "0,1,2,3"


@pytest.fixture
def root(tmp_root: Path) -> str:
    with kvstore.open(tmp_root / "root") as store:
        store.namespace("m", LAYOUT).put(range(8), np.zeros(LAYOUT.shape(8), np.int8))
    return str(tmp_root / "root")


def test_pins_of_a_root_of_one_host_are_made_listed_respected_and_ended(run: Run, root: str) -> None:
    pin = parsed(run("pin", "m", TOKENS, "--root", root, "--json"))
    assert [each["id"] for each in parsed(run("ls", "--pins", "--root", root, "--json"))["pins"]] == [pin["id"]]
    cleared = run("clear", "m", "--yes", "--root", root)
    assert cleared.stdout.startswith("1 chunks deleted") and "1 pinned chunks stay: --pinned" in cleared.stdout
    assert parsed(run("unpin", pin["id"], "--root", root, "--json"))["ended"] is True
    assert parsed(run("ls", "--pins", "--root", root, "--json"))["pins"] == []
    assert parsed(run("clear", "m", "--yes", "--root", root, "--json"))["chunks"] == 1
    assert run("unpin", pin["id"], "--root", root).exit_code == 1


COMMANDS = [("ls", "--pins"), ("clear", "m", "--yes"), ("pin", "m", TOKENS), ("unpin", "a/" + "0" * 32)]


@pytest.mark.parametrize("command", COMMANDS)
def test_pins_of_a_cluster_are_in_etcd(run: Run, root: str, command: tuple[str, ...]) -> None:
    with closing(open_root(root)) as opened:
        publish(opened, Generation(1, bytes(16)), ids=RandomIds(), clock=SystemClock())
    result = run(*command, "--root", root)
    assert result.exit_code == 2 and "the pins of this root are in etcd, or it has none: give --etcd" in result.stderr


def test_a_clear_says_the_same_of_a_root_and_of_workers(run: Run, tmp_root: Path) -> None:
    asked = ("clear", "--tenant", "acme", "--yes")

    def fill(store: kvstore.Store) -> None:
        cache = store.namespace("m", LAYOUT, tenant="acme")
        cache.put(range(12), np.zeros(LAYOUT.shape(12), np.int8))
        cache.pin(range(4))

    with kvstore.open(tmp_root / "alone") as store:
        fill(store)
    with serving(tmp_root / "served") as served:
        with kvstore.connect(served.address) as store:
            fill(store)
        for more, said in (
            (("--dry-run",), "2 chunks would be deleted, "),
            ((), "2 chunks deleted, "),
            (("--pinned",), "1 chunks deleted, "),
        ):
            by_root = run(*asked, *more, "--root", str(tmp_root / "alone"))
            by_worker = run(*asked, *more, "--connect", served.address)
            assert by_worker.stdout == by_root.stdout and by_root.stdout.startswith(said), (more, by_worker.stderr)
            assert ("\n1 pinned chunks stay: --pinned" in by_root.stdout) == ("--pinned" not in more)
            assert by_worker.exit_code == by_root.exit_code == 0
