"""Embedded stores of several processes on one folder: they see each other's holds, pins and evictions, without etcd."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import kvstore
from kvstore.cli.roots import fsck
from kvstore.core.clock import RandomIds, SystemClock
from kvstore.errors import InvalidRequest, RootMismatch, Unavailable
from kvstore.format.header import Generation
from kvstore.format.places import GENERATIONS
from kvstore.host import tables
from kvstore.host.tables import check_left, publish_first
from kvstore.root.identity import newest_number, publish
from kvstore.root.open import open_root
from tests.kit.etcd import running_etcd
from tests.kit.host_process import LAYOUT, TOKENS_COUNT, kv, tokens
from tests.kit.hosts import collected, matched, neighbours
from tests.kit.programs import ended
from tests.kit.stores import SMALL, kv_of, same, store_on

FIRST = Generation(1, bytes(16))


def test_pinned_chunks_of_another_process_stay(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with neighbours(root, "pins") as (pinner,), kvstore.open(root) as store:
        store.namespace("model", LAYOUT).put(tokens(2), kv(2))
        assert [pin.owner for pin in store.pins()] == ["child"]
        assert collected(root).count == 4
        assert (matched(store, 1), matched(store, 2)) == (TOKENS_COUNT, 0)
        pinner.end()
        collected(root)
        assert matched(store, 1) == TOKENS_COUNT, "the pin outlives its process"
        assert store.unpin(store.pins()[0].id)
        collected(root)
        assert matched(store, 1) == 0


def test_held_chunks_of_another_process_stay_until_its_end(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with neighbours(root, "holds") as (holder,), kvstore.open(root) as store:
        assert len(collected(root).held) == 4 and matched(store, 1) == TOKENS_COUNT
        holder.end()
        assert collected(root).count == 4 and matched(store, 1) == 0


def test_a_clear_keeps_pins_of_another_process(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with neighbours(root, "pins"), kvstore.open(root) as store:
        cache = store.namespace("model", LAYOUT)
        cache.put(tokens(2), kv(2))
        cache.clear()
        assert (matched(store, 1), matched(store, 2)) == (TOKENS_COUNT, 0)


def test_removed_files_of_a_used_root_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "JOIN_LOOKS", 10)
    root = tmp_path / "root"
    with kvstore.open(root) as store:
        store.namespace("model", LAYOUT).put(tokens(1), kv(1))
        shutil.rmtree(root / tables.FOLDER)
        with pytest.raises(RootMismatch, match="removed or damaged while other processes use the root: end them"):
            kvstore.open(root)
        assert matched(store, 1) == TOKENS_COUNT
    with kvstore.open(root) as store:  # nobody uses the root any more: they are made again
        assert matched(store, 1) == TOKENS_COUNT and store.stats()["protected"] == 1


def test_a_damaged_file_of_an_unused_root_is_made_anew(tmp_path: Path) -> None:
    root = tmp_path / "root"
    kvstore.open(root).close()
    (root / tables.SHARED).write_bytes(b"not ours" * 512)
    with kvstore.open(root) as store:
        store.namespace("model", LAYOUT).put(tokens(1), kv(1))
        assert store.stats()["protected"] == 1 and collected(root).count == 4


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_read_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "root"
    with kvstore.open(root) as store:
        store.namespace("model", LAYOUT).put(tokens(1), kv(1))
    subprocess.run(["chmod", "-R", "a-w", str(root)], check=True)
    try:
        with caplog.at_level("INFO"), kvstore.open(root) as store:
            assert matched(store, 1) == TOKENS_COUNT and "host.alone" in caplog.text
    finally:
        subprocess.run(["chmod", "-R", "u+w", str(root)], check=True)


def test_a_network_file_system_leaves_a_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    monkeypatch.setattr(tables, "_file_system", lambda folder: 0x6969)
    with kvstore.open(root) as store:
        store.namespace("model", LAYOUT).put(tokens(1), kv(1))
        assert matched(store, 1) == TOKENS_COUNT and not (root / tables.FOLDER).exists()
    with pytest.raises(InvalidRequest, match=r"other hosts may write.*give --etcd"):
        collected(root)


def test_a_root_of_a_cluster_leaves_a_process_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "root"
    with kvstore.open(path) as store:
        assert store.stats()["protected"] == 1
    with closing(open_root(str(path))) as root:
        publish(root, FIRST, ids=RandomIds(), clock=SystemClock())
    with caplog.at_level("WARNING"), kvstore.open(path) as store:
        assert store.stats()["protected"] == 0, "its collectors do not see what is held here"
        assert "it belongs to a cluster: no other process sees what this one holds" in caplog.text
        cache = store.namespace("m", LAYOUT)
        with pytest.raises(InvalidRequest, match="belongs to a cluster, which does not see the pins"):
            cache.pin(tokens(1))
        with pytest.raises(InvalidRequest, match="belongs to a cluster, which does not see the pins"):
            cache.blocks.pin([b"k" * 16])
    with pytest.raises(InvalidRequest, match="belongs to a cluster: give --etcd"):
        collected(path)
    adopted = CliRunner().invoke(fsck, [str(path), "--adopt"])
    assert adopted.exit_code == 2 and "give --etcd ENDPOINTS" in adopted.output, adopted.output


def test_a_cluster_waits_for_the_processes_of_a_host(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "root"
    with running_etcd(tmp_path / "etcd") as server, kvstore.open(path) as store:
        etcd = server.endpoints
        once = [sys.executable, "-m", "kvstore_gc", "--root", str(path), "--etcd", etcd, "--once", "--ttl", "1s"]
        cache = store.namespace("model", LAYOUT)
        cache.put(tokens(1), kv(1))
        with cache.hold(tokens(1)) as hold:
            with pytest.raises(RootMismatch, match=r"share it without etcd.*end them first"):
                kvstore.open(path, etcd=etcd)
            refused = ended(*once)
            assert refused.returncode == 2 and "is KVSTORE_ETCD set?" in refused.stderr, refused
            adopted = CliRunner().invoke(fsck, [str(path), "--adopt", "--etcd", etcd])
            assert adopted.exit_code == 2 and "end them first" in adopted.output, adopted.output
            assert hold.tokens == matched(store, 1) == TOKENS_COUNT
        assert not (path / GENERATIONS).exists()
        store.close()
        with kvstore.open(path, etcd=etcd) as taken, kvstore.open(path, etcd=etcd):
            assert matched(taken, 1) == TOKENS_COUNT
        assert caplog.text.count("root.taken_over") == 1


def test_a_process_that_opens_while_a_cluster_begins_stays(tmp_path: Path) -> None:
    path = tmp_path / "root"
    with closing(open_root(str(path))) as root:
        check_left(root)
        with kvstore.open(path), pytest.raises(RootMismatch, match="end them first"):
            publish_first(root, FIRST, ids=RandomIds(), clock=SystemClock())
        assert not newest_number(root)


def mounting(*command: str) -> None:
    done = ended(*command)
    if done.returncode:
        pytest.skip(f"{' '.join(command)} does not work here: {done.stderr.strip()}")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_unmounted_root_is_misses_and_fills_no_mount_point(tmp_path: Path) -> None:
    image, mount = tmp_path / "image", tmp_path / "ext4"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    mounting("mkfs.ext4", "-q", str(image))
    mounting("mount", "-o", "loop", str(image), str(mount))
    try:
        with store_on(mount / "root") as store:
            cache, tokens = store.namespace("m", SMALL), np.arange(8 * SMALL.chunk_tokens)
            kv, half = kv_of(SMALL, tokens), len(tokens) // 2
            assert cache.put(tokens[:half], kv[:, :, :half]).tokens_present == half
            mounting("umount", "-l", str(mount))
            with pytest.raises(Unavailable, match="mounted"):
                cache.put(tokens, kv)
            assert cache.get(tokens)[0] == 0
            assert list(mount.iterdir()) == [], "the bare mount point stays as it was"
            mounting("mount", "-o", "loop", str(image), str(mount))
            assert cache.put(tokens, kv).tokens_present == len(tokens)
            assert same(cache.get(tokens)[1], kv)
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)
