"""BACKUP.md against a real etcd: a snapshot is taken, etcd goes on, is lost, is restored from it, and adopted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore import Layout
from kvstore.meta.embedded_etcd import EmbeddedEtcd, find_etcd
from tests.kit.collecting import GC, bounded_to
from tests.kit.ports import free_port
from tests.kit.programs import ended

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
LAYOUT = Layout(layers=1, kv_heads=1, head_dim=8, dtype="float16", chunk_tokens=16)
OLD, YOUNG, PLAIN = (list(range(first, first + 64)) for first in (0, 1000, 2000))


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return ended(*command, env={**os.environ, **environment})


def command(module: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command of kvstore; fails the test if the command fails."""
    ran = run(sys.executable, "-m", module, *arguments)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran


@pytest.mark.deploy
def test_pins_younger_than_the_snapshot_are_back_after_the_steps_of_backup_md(tmp_path: Path, tmp_root: Path) -> None:
    etcdctl = Path(find_etcd()).with_name("etcdctl")
    if not etcdctl.exists():
        pytest.skip("needs etcdctl beside etcd")
    peer = free_port()
    programs = {"PATH": f"{etcdctl.parent}:{os.environ['PATH']}"}
    with EmbeddedEtcd(tmp_path / "before", peer_port=peer, client_port=free_port()) as etcd:
        endpoints, port = etcd.endpoints, int(etcd.endpoints.rpartition(":")[2])
        with kvstore.open(str(tmp_root), etcd=endpoints) as store:
            cache = store.namespace("backed-up", LAYOUT)
            for tokens in (OLD, YOUNG, PLAIN):
                cache.put(tokens, np.zeros(LAYOUT.shape(64), np.float16))
            cache.pin(OLD, ttl=3600)
            saved = run(DEPLOY / "systemd" / "etcd-snapshot", tmp_path, "3", ETCDCTL_ENDPOINTS=endpoints, **programs)
            assert saved.returncode == 0, saved.stderr
            cache.pin(YOUNG, ttl=3600)
    (snapshot,) = tmp_path.glob("etcd-*.db")
    restored = run(
        etcdctl,
        "snapshot",
        "restore",
        snapshot,
        "--data-dir",
        tmp_path / "after" / "data",
        "--name",
        "kvstore",
        "--initial-cluster",
        f"kvstore=http://127.0.0.1:{peer}",
        "--initial-advertise-peer-urls",
        f"http://127.0.0.1:{peer}",
    )
    assert restored.returncode == 0, restored.stderr
    with EmbeddedEtcd(tmp_path / "after", client_port=port, peer_port=peer):
        ls = ("ls", "--pins", "--json", "--root", tmp_root, "--etcd", endpoints)
        assert len(json.loads(command("kvstore.cli.main", *ls).stdout)["pins"]) == 1
        command("kvstore.cli.main", "fsck", tmp_root, "--adopt", "--etcd", endpoints)
        assert len(json.loads(command("kvstore.cli.main", *ls).stdout)["pins"]) == 2
        collect = ("--root", str(tmp_root), "--etcd", endpoints, "--once", *bounded_to(1), "--json")
        run(*GC, *collect, PYTHONPATH=f"{DEPLOY.parent}:{DEPLOY.parent / 'gc'}")
        with kvstore.open(str(tmp_root), etcd=endpoints) as store:
            cache = store.namespace("backed-up", LAYOUT)
            assert [cache.match(tokens) for tokens in (OLD, YOUNG, PLAIN)] == [64, 64, 0]
