"""Real etcd servers for tests, which can be frozen, killed, compacted and cut off."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from pyetcd import etcdrpc

from kvstore.meta.embedded_etcd import EmbeddedEtcd, find_etcd
from tests.kit.patience import PATIENCE_S as PATIENCE_S
from tests.kit.patience import eventually as eventually
from tests.kit.patience import is_stopped
from tests.kit.ports import free_port

if TYPE_CHECKING:  # engines' environments have no cryptography
    from tests.kit.certificates import Authority


@contextmanager
def running_etcd(folder: Path, *arguments: str) -> Iterator[EmbeddedEtcd]:
    """An etcd with its files in ``folder``."""
    with EmbeddedEtcd(folder, arguments=arguments) as server:
        yield server


@contextmanager
def stubs(endpoint: str) -> Iterator[tuple[Any, Any]]:
    """Returns etcd's own KV and Auth services, for calls that the store never makes."""
    with grpc.insecure_channel(endpoint) as channel:
        yield etcdrpc.KVStub(channel), etcdrpc.AuthStub(channel)


def compact(endpoint: str, revision: int) -> None:
    """Makes etcd forget the history before ``revision``."""
    with stubs(endpoint) as (kv, _):
        kv.Compact(etcdrpc.CompactionRequest(revision=revision, physical=True), timeout=PATIENCE_S)


def enable_auth(endpoint: str, user: str, password: str, prefix: str) -> None:
    """Switches authentication on, with ``user`` allowed to read and write ``prefix``."""
    with stubs(endpoint) as (_, auth):
        for name, word in (("root", "root"), (user, password)):
            auth.UserAdd(etcdrpc.AuthUserAddRequest(name=name, password=word), timeout=PATIENCE_S)
        auth.RoleAdd(etcdrpc.AuthRoleAddRequest(name="kv"), timeout=PATIENCE_S)
        permission = etcdrpc.AuthRoleGrantPermissionRequest(name="kv")
        permission.perm.permType = 2
        permission.perm.key = prefix.encode()
        permission.perm.range_end = prefix.encode()[:-1] + bytes([prefix.encode()[-1] + 1])
        auth.RoleGrantPermission(permission, timeout=PATIENCE_S)
        auth.UserGrantRole(etcdrpc.AuthUserGrantRoleRequest(user="root", role="root"), timeout=PATIENCE_S)
        auth.UserGrantRole(etcdrpc.AuthUserGrantRoleRequest(user=user, role="kv"), timeout=PATIENCE_S)
        auth.AuthEnable(etcdrpc.AuthEnableRequest(), timeout=PATIENCE_S)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stops a process by SIGSTOP, waits until its last thread stands still, and continues it afterwards."""
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: is_stopped(pid))
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class Proxy:
    """A TCP relay in front of a server, which can swallow the server's answers, and cut connections.

    ``change`` is called with each piece, and returns what is passed on.
    """

    def __init__(self, target: str, port: int = 0, change: Callable[[bytes], bytes] = bytes) -> None:
        host, target_port = target.rsplit(":", 1)
        self._target = (host, int(target_port))
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self.endpoint = f"127.0.0.1:{self.port}"
        self.swallow = threading.Event()
        self._change = change
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Breaks all connections; new ones are accepted."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            each.close()

    def close(self) -> None:
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [near, far]
            threading.Thread(target=self._relay, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._relay, args=(far, near, True), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        try:
            while piece := source.recv(65536):
                if not (answers and self.swallow.is_set()):
                    sink.sendall(self._change(piece))
            sink.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


@contextmanager
def tls_etcd(folder: Path, authority: Authority) -> Iterator[str]:
    """An etcd that speaks only TLS and wants a client certificate of ``authority``; its endpoint, without scheme."""
    server = authority.server()
    port, peer = free_port(), free_port()
    client_url, peer_url = f"https://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
    command = [
        find_etcd(),
        f"--data-dir={folder / 'tls'}",
        "--name=tls",
        f"--initial-cluster=tls={peer_url}",
        f"--listen-client-urls={client_url}",
        f"--advertise-client-urls={client_url}",
        f"--listen-peer-urls={peer_url}",
        f"--initial-advertise-peer-urls={peer_url}",
        f"--cert-file={server.cert}",
        f"--key-file={server.key}",
        f"--trusted-ca-file={authority.ca}",
        "--client-cert-auth",
        "--log-level=error",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
