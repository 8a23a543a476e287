"""Embedded stores of several processes on one folder: they share sessions, holds, pins and sweeps, without etcd."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import kvstore
from kvstore.cli.fsck import fsck
from kvstore.client.cache import Cache
from kvstore.client.store import Store
from kvstore.errors import InvalidRequest, Overloaded, RootMismatch, SessionLost, Unavailable
from kvstore.format.generation import Generation
from kvstore.format.places import GENERATIONS, METADATA, METADATA_LIVENESS
from kvstore.meta.sqlite import host
from kvstore.node.member import Sharing
from kvstore.node.opening import open_member
from kvstore.root.generations import newest_number, publish
from kvstore.root.open import open_root
from kvstore.root.takeover import check_left, publish_first
from kvstore.sources import RandomIds, SystemClock
from kvstore_gc.collector import Collector, opened
from kvstore_gc.config import Config
from kvstore_gc.summary import Summary
from tests.kit.cases import for_each
from tests.kit.etcd import running_etcd
from tests.kit.host_process import LAYOUT, TOKENS_COUNT, kv, tokens
from tests.kit.patience import PATIENCE_S, eventually, returns

FIRST = Generation(1, bytes(16))
META_S = 25.0
"""The collector's calls wait so long for the metadata file on a disk that others keep busy."""


@contextmanager
def running(root: Path, what: str) -> Iterator[subprocess.Popen[str]]:
    """A process of ``host_process`` that has begun."""
    command = [sys.executable, "-m", "tests.kit.host_process", str(root), what]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert said(child) == "begun"
        yield child
    finally:
        child.kill()
        child.communicate()


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return returns(child.stdout.readline).strip()


def let_go(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()
    assert said(child) == "done"
    assert child.wait(PATIENCE_S) == 0


def collected(root: Path) -> Summary:
    """One round that deletes all that nobody uses."""
    with opened(str(root), {}, None) as site:
        site = replace(site, timings=replace(site.timings, meta_timeout_s=META_S))
        summary = Collector(site, Config(max_bytes=1), threading.Event().wait).once(lambda shard: None)
    assert summary is not None
    return summary


def pinned(cache: Cache) -> int:
    """Pins the first prompt; returns the tokens of the pin, 0 if nothing can be pinned yet."""
    try:
        return cache.pin(tokens(1)).tokens
    except (Unavailable, SessionLost):
        return 0


def matched(store: Store, prompt: int) -> int:
    return store.namespace("model", LAYOUT).match(tokens(prompt))


def test_a_check_says_that_the_metadata_are_lost_and_makes_none(tmp_path: Path) -> None:
    root = tmp_path / "root"

    def checked(*options: str) -> tuple[int, str]:
        done = CliRunner().invoke(fsck, [str(root), *options])
        return done.exit_code, done.output

    with kvstore.open(str(root)) as store:
        store.namespace("model", LAYOUT).put(tokens(1), kv(1))
    assert checked()[0] == 0
    for each in root.glob(f"{METADATA}*"):
        each.unlink()
    code, output = checked()
    assert code == 1 and "is gone" in output and "`kvstore fsck ROOT --adopt`" in output
    assert "1 problem, 1 not repaired" in output
    assert not (root / METADATA).exists()
    assert checked("--json")[0] == 1
    with kvstore.open(str(root)):
        pass  # makes a file, which is not the root's
    code, output = checked()
    assert code == 1 and f"{METADATA} has none" in output and "1 problem," in output
    assert checked("--adopt")[0] == 0
    assert checked()[0] == 0


def test_what_another_process_pinned_stays_and_all_else_goes(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with running(root, "pins") as child, kvstore.open(str(root)) as store:
        store.namespace("model", LAYOUT).put(tokens(2), kv(2))
        assert [pin.owner for pin in store.pins()] == ["child"]
        assert collected(root).reaped.count == 4
        assert (matched(store, 1), matched(store, 2)) == (TOKENS_COUNT, 0)
        let_go(child)
        collected(root)
        assert matched(store, 1) == TOKENS_COUNT, "the pin outlives its process"
        assert store.unpin(store.pins()[0].id)
        collected(root)
        assert matched(store, 1) == 0


def test_what_another_process_holds_stays_until_it_lets_go(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with running(root, "holds") as child, kvstore.open(str(root)) as store:
        summaries: list[Summary] = []
        with opened(str(root), {}, None) as site:
            collector = Collector(site, Config(max_bytes=1), threading.Event().wait)
            thread = threading.Thread(target=lambda: summaries.append(collector.once(lambda shard: None)))  # type: ignore[arg-type]
            thread.start()
            eventually(lambda: matched(store, 1) == 0, "it is condemned")
            assert sum(1 for _ in (root / "chunks").glob("*/*")) == 4
            let_go(child)
            thread.join(PATIENCE_S)
        assert summaries[0].reaped.count == 4


def test_a_killed_process_holds_nothing_once_its_lease_is_over(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with running(root, "holds") as child:
        child.kill()
        child.wait(PATIENCE_S)
        assert collected(root).reaped.count == 4


def test_a_clear_in_one_process_spares_what_another_pinned(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with running(root, "pins"), kvstore.open(str(root)) as store:
        cache = store.namespace("model", LAYOUT)
        cache.put(tokens(2), kv(2))
        cache.clear()
        assert (matched(store, 1), matched(store, 2)) == (TOKENS_COUNT, 0)


def test_the_file_is_removed_nothing_is_collected_and_one_command_mends_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with kvstore.open(str(root)) as store:
        cache = store.namespace("model", LAYOUT)
        cache.put(tokens(1), kv(1))
        for path in root.glob(f"{METADATA}*"):
            path.unlink()
        with pytest.raises(RootMismatch, match="kvstore fsck ROOT --adopt"):
            collected(root)
        cache.put(tokens(2), kv(2))
        count, into = cache.get(tokens(1))
        assert count == TOKENS_COUNT and (np.asarray(into) == 1).all()
        eventually(lambda: not store.stats()["protected"], "its session is lost")
        with pytest.raises(Unavailable):
            cache.pin(tokens(1))
        with kvstore.open(str(root)) as other:
            assert matched(other, 2) == TOKENS_COUNT and not other.stats()["protected"]
        adopted = CliRunner().invoke(fsck, [str(root), "--adopt"])
        assert adopted.exit_code == 0 and "generation 1 -> 2" in adopted.output, adopted.output
        eventually(lambda: pinned(cache) == TOKENS_COUNT, "it protects again, once it has noticed")
        assert collected(root).reaped.count == 4
        assert (matched(store, 1), matched(store, 2)) == (TOKENS_COUNT, 0)


def put_once(cache: Cache, seed: int) -> bool:
    try:
        cache.put(tokens(seed), kv(seed))
    except Overloaded:
        return False
    return True


@for_each("moment", ["before it begins", "while it lives"])
def test_a_damaged_file_protects_nothing_and_one_command_mends_it(tmp_path: Path, moment: str) -> None:
    root = tmp_path / "root"
    with kvstore.open(str(root)) as store:
        store.namespace("model", LAYOUT).put(tokens(1), kv(1))
    if moment == "before it begins":
        damage(root)
    with kvstore.open(str(root)) as store:
        cache = store.namespace("model", LAYOUT)
        if moment == "while it lives":
            damage(root)
        cache.put(tokens(2), kv(2))
        assert matched(store, 1) == TOKENS_COUNT
        with pytest.raises(Unavailable, match="is damaged"):
            collected(root)
        if moment == "before it begins":  # one that has read the file before may not notice yet
            with pytest.raises(Unavailable):
                cache.pin(tokens(1))
        adopted = CliRunner().invoke(fsck, [str(root), "--adopt"])
        assert adopted.exit_code == 0 and "metadata.sqlite was damaged" in adopted.output, adopted.output
        eventually(lambda: pinned(cache) == TOKENS_COUNT, "it protects again, once it has noticed")
        eventually(lambda: put_once(cache, 2), "the put, once a collector has counted the root")
        assert collected(root).reaped.count == 4
        assert (matched(store, 1), matched(store, 2)) == (TOKENS_COUNT, 0), "what it pinned stays"


def damage(root: Path) -> None:
    """Fills the metadata with what nobody wrote."""
    for path in root.glob(f"{METADATA}*"):
        if not path.name.endswith("-shm"):
            with path.open("r+b") as file:
                file.write(bytes(range(256)) * (max(path.stat().st_size, 16384) // 256))


def test_a_full_disk_leaves_a_process_unprotected_that_still_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mount = tmp_path / "tmpfs"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)]
    if subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        with kvstore.open(str(mount / "root")) as store:
            store.namespace("model", LAYOUT).put(tokens(1), kv(1))
        with open(mount / "other", "wb", buffering=0) as other, suppress(OSError):
            while True:
                other.write(bytes(4096))
        with kvstore.open(str(mount / "root")) as store:
            assert matched(store, 1) == TOKENS_COUNT
        assert "host.unprotected" in caplog.text
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def test_a_network_file_system_leaves_a_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    monkeypatch.setattr(host, "_file_system", lambda folder: 0x6969)
    member = open_member(str(root))
    assert member.sharing is Sharing.ALONE and not (root / METADATA).exists()
    member.close()
    with pytest.raises(InvalidRequest, match=r"NFS.*give --etcd"):
        collected(root)


def test_a_root_of_a_cluster_leaves_a_process_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "root"
    with kvstore.open(str(path)) as store:
        assert store.stats()["protected"] == 1
    root = open_root(str(path))
    publish(root, Generation(1, bytes(16)), ids=RandomIds(), clock=SystemClock())
    root.close()
    assert (path / GENERATIONS / "1").exists()
    member = open_member(str(path))
    assert member.sharing is Sharing.ALONE
    member.close()
    with caplog.at_level("WARNING"), kvstore.open(str(path)) as store:
        assert store.stats()["protected"] == 0, "its collectors do not see what is held here"
        assert "it belongs to a cluster: no other process sees what this one holds" in caplog.text
        cache = store.namespace("m", LAYOUT)
        with pytest.raises(InvalidRequest, match="belongs to a cluster, which does not see the pins"):
            cache.pin(tokens(1))
        with pytest.raises(InvalidRequest, match="belongs to a cluster, which does not see the pins"):
            cache.blocks.pin([b"k" * 16])
    with pytest.raises(RootMismatch, match="belongs to a cluster"):
        collected(path)
    adopted = CliRunner().invoke(fsck, [str(path), "--adopt"])
    assert adopted.exit_code == 2 and "give --etcd ENDPOINTS" in adopted.output, adopted.output


def test_a_cluster_waits_until_the_processes_of_the_host_have_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "root"
    with running_etcd(tmp_path / "etcd") as server, kvstore.open(path) as store:
        etcd = server.endpoints
        once = [sys.executable, "-m", "kvstore_gc", "--root", str(path), "--etcd", etcd, "--once", "--ttl", "1s"]
        cache = store.namespace("model", LAYOUT)
        cache.put(tokens(1), kv(1))
        with cache.hold(tokens(1)) as hold:
            with pytest.raises(RootMismatch, match=r"share it without etcd.*end them first"):
                kvstore.open(path, etcd=etcd)
            refused = subprocess.run(once, capture_output=True, text=True, check=False)
            assert refused.returncode == 2 and "is KVSTORE_ETCD set?" in refused.stderr, refused
            adopted = CliRunner().invoke(fsck, [str(path), "--adopt", "--etcd", etcd])
            assert adopted.exit_code == 2 and "end them first" in adopted.output, adopted.output
            assert hold.tokens == matched(store, 1) == TOKENS_COUNT
        assert not (path / GENERATIONS).exists()
        store.close()
        with kvstore.open(path, etcd=etcd) as taken, kvstore.open(path, etcd=etcd):
            assert matched(taken, 1) == TOKENS_COUNT
        assert caplog.text.count("root.taken_over") == 1


@for_each("place", ["a folder", "a link", "a pipe"])
def test_a_cluster_takes_no_root_that_does_not_tell_whether_it_is_in_use(tmp_path: Path, place: str) -> None:
    path = tmp_path / "root"
    kvstore.open(path).close()
    (path / METADATA_LIVENESS).unlink()
    if place == "a folder":
        (path / METADATA_LIVENESS).mkdir()
    elif place == "a link":
        (path / METADATA_LIVENESS).symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(path / METADATA_LIVENESS)
    with closing(open_root(str(path))) as root:
        with pytest.raises(RootMismatch, match=r"does not tell whether .* end them, and remove it"):
            check_left(root)
        with pytest.raises(RootMismatch, match="does not tell"):
            publish_first(root, FIRST, ids=RandomIds(), clock=SystemClock(), folder=GENERATIONS)
        assert not newest_number(root)


def test_a_process_that_comes_while_a_cluster_begins_keeps_the_root(tmp_path: Path) -> None:
    path = tmp_path / "root"
    with closing(open_root(str(path))) as root:
        check_left(root)
        with kvstore.open(path), pytest.raises(RootMismatch, match="end them first"):
            publish_first(root, FIRST, ids=RandomIds(), clock=SystemClock(), folder=GENERATIONS)


def test_a_root_in_memory_leaves_a_process_alone() -> None:
    member = open_member("memory://")
    assert member.sharing is Sharing.ALONE
    member.close()


def test_no_chunk_costs_the_file_anything(tmp_path: Path) -> None:
    member = open_member(str(tmp_path / "root"))
    member.close()
    with kvstore.open(str(tmp_path / "root")) as store:
        cache = store.namespace("model", LAYOUT)
        before = store.stats()["etcd_operations"]
        for prompt in range(20):
            cache.put(tokens(prompt), kv(prompt))
            assert cache.match(tokens(prompt)) == cache.get(tokens(prompt))[0] == TOKENS_COUNT
            cache.hold(tokens(prompt)).release()
        # Nothing but keepalives, however slow this was.
        assert store.stats()["etcd_operations"] - before < 20
