"""Commands about the pins of a root: on a root of one host, in etcd, or not known."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

import kvstore
from kvstore.format.header import Generation
from kvstore.root.identity import publish
from kvstore.root.open import open_root
from kvstore.sources import RandomIds, SystemClock
from tests.cli.conftest import parsed
from tests.kit.cases import for_each
from tests.kit.workers import serving

Run = Callable[..., Result]
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


@for_each(
    "arguments, said",
    [
        (("mach", "m"), "kvstore: there is no command 'mach': did you mean 'match'? (kvstore --help lists all)"),
        (("prefech",), "did you mean 'prefetch'?"),
        (("token", "isue"), "kvstore token: there is no command 'isue': did you mean 'issue'?"),
        (("xyzzy",), "kvstore: there is no command 'xyzzy' (kvstore --help lists all)"),
        (("ls", "--rot", "x"), "did you mean one of: '--root', '--root-id'?"),
        (("--vers",), "kvstore: no such option '--vers'. Did you mean '--version'?"),
    ],
)
def test_a_mistyped_command_or_option_is_one_line_with_what_is_alike(
    run: Run, arguments: tuple[str, ...], said: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == "" and len(result.stderr.strip().splitlines()) == 1
    assert said.lower() in result.stderr.lower()


def test_the_dashboard_takes_the_root_although_workers_are_in_the_environment(
    run: Run, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_ROOT", root)
    monkeypatch.setenv("KVSTORE_CONNECT", "127.0.0.1:1")
    result = run("dashboard", "--listen", "10.0.0.7:80", "--etcd", "127.0.0.1:2")
    notes, error = result.stderr.strip().splitlines()
    assert notes == "kvstore dashboard: KVSTORE_CONNECT is not used here: etcd names the workers"
    assert error.startswith("kvstore dashboard: others can reach --listen 10.0.0.7:80"), "the root and etcd are given"


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
