"""Real kernels on one machine, as user-mode Linux: hosts with a disk, and an NFS server with its clients.

A guest's root file system is this machine's, so it runs this checkout. It shares the machine's cores, so speed means
nothing inside.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvstore.meta.embedded_etcd import find_etcd
from tests.kit.patience import eventually

MODULES = Path("/usr/lib/uml/modules")
NEEDED = ("linux.uml", "ip", "rpc.nfsd", "mkfs.ext4", "mkfs.xfs", "mount.nfs")
PACKAGES = "user-mode-linux kmod nfs-common nfs-kernel-server iproute2 e2fsprogs xfsprogs"
BOOT_S = 120.0
HALT_S = 10.0
MEMORY = "1G"
DISK_BYTES = 2 << 30
HOST = "10.99.0.254"
"""This machine's address on the guests' network."""
ENVIRONMENT = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
INIT = Path(__file__).with_name("guest.sh")


def missing() -> str:
    """Returns what keeps guests from running here, in words; empty if nothing does."""
    absent = [name for name in NEEDED if shutil.which(name, path=ENVIRONMENT["PATH"]) is None]
    if os.geteuid():
        return "guests need root"
    return f"{', '.join(absent)} missing: apt-get install {PACKAGES}" if absent else ""


class Guest:
    """One running kernel, which says what it printed and how it ended in files of ``work``."""

    def __init__(self, work: Path, name: str, *arguments: str, inside: Sequence[str] = (), job: str = "") -> None:
        """``arguments`` are the kernel's; ``job`` is a Python module with its arguments, ``inside`` a prefix."""
        self._work = work
        self._name = name
        if job:
            command = f"cd {shlex.quote(os.getcwd())} && PYTHONPATH=.:gc exec {shlex.quote(sys.executable)} -m {job}"
            (work / f"{name}.job").write_text(command)
        kernel = next(MODULES.iterdir()).name
        if not os.path.lexists(f"/lib/modules/{kernel}"):
            os.makedirs("/lib/modules", exist_ok=True)
            os.symlink(MODULES / kernel, f"/lib/modules/{kernel}")
        started = [
            *(*inside, "linux.uml", f"mem={MEMORY}", "rootfstype=hostfs", "rootflags=/", "rw", f"init={INIT}"),
            *(f"NAME={name}", f"WORK={work}", f"JOB={work}/{name}.job", "con=null", "con0=null,fd:1", "quiet"),
            *arguments,
        ]
        with (work / f"{name}.console").open("wb") as console:
            self._kernel = subprocess.Popen(
                started, stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True
            )

    def output(self, timeout_s: float) -> str:
        """Returns what the job printed. Raises AssertionError if it fails or takes longer."""
        ended = self._work / f"{self._name}.rc"
        wait_for(ended, timeout_s)
        output = (self._work / f"{self._name}.out").read_text(errors="replace")
        assert ended.read_text().strip() == "0", output
        return output

    def join(self, timeout_s: float) -> None:
        """Waits until the kernel has halted, at most so long."""
        with suppress(subprocess.TimeoutExpired):
            self._kernel.wait(timeout_s)

    def kill(self) -> None:
        """Ends it as a power cut does: what its kernel had not written to its disk is gone."""
        if self._kernel.poll() is None:
            os.killpg(self._kernel.pid, signal.SIGKILL)
        self._kernel.wait()


class Export:
    """An NFS server and clients in a network namespace, which live as long as the context.

    The clients find the server's disk at /mnt/nfs.
    """

    def __init__(self, work: Path, clients: int, options: str) -> None:
        """``work`` is a folder that all see; ``options`` are those of the clients' mounts."""
        self._work = work
        self._clients = clients
        self._options = options
        self._space = f"kvhosts{os.getpid()}"
        self._started: dict[int, Guest] = {}
        self._etcd: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Export:
        _run("ip", "netns", "add", self._space)
        try:
            self._wire()
            make_disk(self._work / "export.img", "ext4")
            self.boot_server()
        except BaseException:
            self.__exit__()
            raise
        return self

    def run(self, jobs: Sequence[str], timeout_s: float) -> list[str]:
        """Runs one Python module with its arguments on each client; returns what they printed."""
        clients = [self.boot(number, job) for number, job in enumerate(jobs, 1)]
        return [client.output(timeout_s) for client in clients]

    def boot(self, number: int, job: str) -> Guest:
        """Boots client ``number``, from 1, again if it ran, which does the job."""
        return self._start(f"client{number}", number, job)

    def boot_server(self) -> None:
        """Boots the server, again as after a power cut if it runs; its clients wait for it and go on."""
        self.kill(0)
        ready = self._work / "server.ready"
        ready.unlink(missing_ok=True)
        self._start("server", 0, "", f"ubda={self._work / 'export.img'}")
        wait_for(ready, BOOT_S)

    def kill(self, number: int) -> None:
        """Ends a client, or the server (0), as a power cut does."""
        if number in self._started:
            self._started.pop(number).kill()

    def cut(self, number: int, *, off: bool) -> None:
        """Takes a client off the network, or puts it on again."""
        # Unplugged from the bridge: a guest whose tap went down stays off for ever.
        self._inside("ip", "link", "set", f"tap{number}", *(["nomaster"] if off else ["master", "br0"]))

    def etcd(self) -> str:
        """Starts an etcd on the clients' network; returns its endpoint."""
        client, peer = f"http://{HOST}:2379", f"http://{HOST}:2380"
        flags = {
            "data-dir": str(self._work / "etcd"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "log-level": "error",
        }
        command = [find_etcd(), *(f"--{name}={value}" for name, value in flags.items())]
        with (self._work / "etcd.log").open("wb") as log:
            inside = ("ip", "netns", "exec", self._space)
            self._etcd = subprocess.Popen([*inside, *command], stdout=log, stderr=log, env=ENVIRONMENT)
        return f"{HOST}:2379"

    def __exit__(self, *_: object) -> None:
        (self._work / "stop").touch()
        if 0 in self._started:  # the server unmounts its disk
            self._started[0].join(HALT_S)
        for number in list(self._started):
            self.kill(number)
        if self._etcd is not None:
            self._etcd.kill()
            self._etcd.wait()
        subprocess.run(["ip", "netns", "del", self._space], check=False)

    def _wire(self) -> None:
        self._inside("ip", "link", "set", "lo", "up")
        self._inside("ip", "link", "add", "br0", "type", "bridge")
        self._inside("ip", "addr", "add", f"{HOST}/24", "dev", "br0")
        self._inside("ip", "link", "set", "br0", "up")
        for number in range(self._clients + 1):
            self._inside("ip", "tuntap", "add", "dev", f"tap{number}", "mode", "tap")
            self._inside("ip", "link", "set", f"tap{number}", "master", "br0", "up")

    def _start(self, name: str, number: int, job: str, *more: str) -> Guest:
        guest = Guest(
            self._work,
            name,
            f"ROLE={'client' if number else 'server'}",
            f"ADDRESS=10.99.0.{number + 1}",
            f"OPTIONS={self._options}",
            f"vec0:transport=tap,ifname=tap{number},depth=64",
            *more,
            inside=("ip", "netns", "exec", self._space),
            job=job,
        )
        self._started[number] = guest
        return guest

    def _inside(self, *command: str) -> None:
        _run("ip", "netns", "exec", self._space, *command)


def on_disk(work: Path, name: str, file_system: str, job: str) -> Guest:
    """Boots a host without a network whose disk, ``work/disk.img``, is at /mnt/disk."""
    return Guest(work, name, "ROLE=disk", f"OPTIONS={file_system}", f"ubda={work / 'disk.img'}", job=job)


def make_disk(path: Path, file_system: str) -> None:
    """Makes an empty disk."""
    with path.open("wb") as file:
        file.truncate(DISK_BYTES)
    _run(f"mkfs.{file_system}", "-q", "-F" if file_system == "ext4" else "-f", str(path))


def wait_for(path: Path, timeout_s: float) -> None:
    """Returns once there is such a file. Raises AssertionError if it does not come in time."""
    eventually(path.exists, f"{path} (see the *.console and *.out beside it)", timeout_s)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, env=ENVIRONMENT)
