"""The cluster: three hosts on one switch, each with an etcd member, a part of the file system, a worker and a cron job.

A host's boot starts what systemd would start, each restarted whenever it ends. Nothing else ever repairs a host,
whatever a scenario does to it. The rack is a separate machine: the switch, the disks, and the file system's master.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from tests.cluster.load import Papers
from tests.cluster.machine import Machine
from tests.cluster.members import CLIENT_PORT, ETCD, EtcdMember, leader_of
from tests.cluster.moosefs import MASTER, MOUNT, PACKAGES, MooseHost, MooseMaster, missing_programs
from tests.kit.certificates import Authority
from tests.kit.etcd import eventually

MIB = 1 << 20
HOSTS = ("host1", "host2", "host3")
NETWORK = "10.79.0.0/24"
RACK = "10.79.0.254"
ROOT = f"{MOUNT}/root"
WORKER_PORT = 7070
WORKER, CRON = "worker", "cron"
"""Names of services."""
ENGINE, OPERATOR = "engine", "operator"
"""The others that have a certificate."""
IDENTITIES = {
    **{f"cert:{name}": {"*": "read"} for name in HOSTS},  # what peers may do with each other
    f"cert:{ENGINE}": {"": "write"},
    f"cert:{OPERATOR}": {"*": "admin"},
}
CHUNKS_BYTES, ETCD_BYTES = 320 * MIB, 512 * MIB
"""The disks of each host; every file of the store lies on two of the former, in pieces of 64 KiB."""
ROOT_BYTES_MAX = 24 * MIB
"""What chunks may take: less than the trace has, so that every round of the collector has something to take."""
MEMORY_BYTES = 24 * MIB
BALLAST_LEFT_BYTES = 112 * MIB
"""Bytes of a disk: MooseFS puts nothing new on one that has less than 64 MiB beside what it keeps free."""
JUNK = f"{MOUNT}/junk"
FILL_S = 90.0
SHARD_BITS = 4
DRAIN = "10s"
CRON_S = 4
READY_S = 60.0
_BALLAST = """
free=$(df --output=avail -k "$(dirname "$0")" | tail -1)
[ "$free" -le "$1" ] || fallocate -l $((free - $1))KiB "$0"
"""
PROJECT = Path(__file__).resolve().parents[2]
PYTHON = {"PYTHONPATH": f"{PROJECT}{os.pathsep}{PROJECT / 'gc'}", "PYTHONUNBUFFERED": "1"}


def why_not() -> str | None:
    """Returns why no cluster can be started here; None if one can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux, for namespaces and mounts"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "needs /dev/fuse, for mounts of the file system"
    if missing := missing_programs():
        return f"needs MooseFS ({', '.join(missing)} not found): apt-get install {PACKAGES}"
    if missing := [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]:
        return f"needs {', '.join(missing)}: apt-get install iproute2 util-linux"
    return None


@dataclass(slots=True)
class Host:
    """One host."""

    number: int
    machine: Machine
    address: str
    papers: Papers
    member: EtcdMember
    files: MooseHost

    @property
    def name(self) -> str:
        return self.machine.name

    @property
    def worker(self) -> str:
        """The address of its worker."""
        return f"{self.address}:{WORKER_PORT}"


class Cluster:
    """All of it. ``folder`` gets logs and certificates; disks are memory that ends with the rack."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journals = folder / "journals"
        self._disks = folder / "disks"
        self.rack = Machine("rack", folder / "logs" / "rack")
        self._authority = Authority(folder / "certificates")
        self._papers: dict[str, Papers] = {}
        self._access = folder / "certificates" / "access.json"
        self._master = MooseMaster(self.rack, self._disks / "rack", folder / "settings" / "rack", NETWORK)
        self.hosts: list[Host] = []

    # On and off

    def start(self) -> None:
        """Switches everything on, and waits until every worker serves."""
        for each in (self._disks, self.journals):
            each.mkdir(parents=True)
        self._papers = {name: papers_of(self._authority, name) for name in (ENGINE, OPERATOR)}
        self._access.write_text(json.dumps({"identities": IDENTITIES}))
        self._access.chmod(0o600)
        self.rack.boot()
        self.rack.ip("link", "add", "name", "switch", "type", "bridge")
        self.rack.ip("address", "add", f"{RACK}/24", "dev", "switch")
        self.rack.ip("link", "set", "switch", "up")
        self._mount_disk("rack", CHUNKS_BYTES)
        self._master.prepare()
        self._master.start()
        addresses = {name: f"10.79.0.{number}" for number, name in enumerate(HOSTS, 1)}
        for number, name in enumerate(HOSTS):
            self._mount_disk(f"{name}-chunks", CHUNKS_BYTES)
            self._mount_disk(f"{name}-etcd", ETCD_BYTES)
            self.hosts.append(self._host(number, name, addresses))
        for host in self.hosts:
            self._plug_in(host)
            host.files.start()
            host.member.start()
        for host in self.hosts:
            host.files.wait_mounted()
        self.hosts[0].files.settle()
        eventually(lambda: leader_of([host.member for host in self.hosts]) is not None, patience_s=READY_S)
        for host in self.hosts:
            self._start_services(host)
            # One after the other, the first time: the first one makes the root.
            self.wait_ready(host, 0)

    def close(self) -> None:
        """Switches everything off. Nothing is left: it was all in namespaces that end now."""
        for host in self.hosts:
            host.machine.off()
        self.rack.off()

    def boot(self, host: Host) -> None:
        """Switches one host on, as after a power cut: everything starts by itself, in any order."""
        self._plug_in(host)
        host.files.start()
        host.member.start()
        self._start_services(host)

    def cut_power(self, host: Host) -> None:
        """The host is gone without a word: its peers see no connection closed, only silence."""
        self.unplug(host)
        host.machine.off()
        # Its end of the cable goes away a moment after its last process, and takes this one along, if we are not first.
        self.rack.ip("link", "delete", host.name, check=False)

    def unplug(self, host: Host) -> None:
        """The switch forwards nothing more from or to it."""
        self.rack.ip("link", "set", host.name, "nomaster")

    def plug(self, host: Host) -> None:
        """The opposite of unplug."""
        self.rack.ip("link", "set", host.name, "master", "switch")

    # What runs on it

    def start_worker(self, host: Host) -> None:
        """The worker as a service; it starts once the mount is there."""
        command = [
            *kvstore("worker"),
            f"--root={ROOT}",
            *self.etcd_options(host),
            f"--listen={host.worker}",
            "--metrics=127.0.0.1:0",
            f"--drain={DRAIN}",
            f"--memory={MEMORY_BYTES}",
            f"--shard-bits={SHARD_BITS}",
            f"--tls-cert={host.papers.cert}",
            f"--tls-key={host.papers.key}",
            f"--tls-client-ca={host.papers.ca}",
            f"--access={self._access}",
            f"--audit-log={host.machine.logs / 'audit.log'}",
        ]
        host.machine.start(
            WORKER, ["sh", "-c", f'mountpoint -q {MOUNT} && exec "$@"', "sh", *command], environment=PYTHON
        )

    def etcd_options(self, host: Host) -> list[str]:
        """Returns the options by which a command on this host reaches etcd."""
        papers = host.papers
        files = [f"--etcd-ca={papers.ca}", f"--etcd-cert={papers.cert}", f"--etcd-key={papers.key}"]
        return [f"--etcd={self.endpoints}", *files]

    @property
    def endpoints(self) -> str:
        """etcd's members."""
        return ",".join(f"{host.address}:{CLIENT_PORT}" for host in self.hosts)

    def wait_ready(self, host: Host, seen: int) -> None:
        """Until its worker has said more often than ``seen`` times that it serves."""
        eventually(lambda: self.ready_count(host) > seen, patience_s=READY_S)

    def collecting(self, host: Host) -> list[str]:
        """The command of a collector's round."""
        command = [sys.executable, "-m", "kvstore_gc", f"--root={ROOT}", *self.etcd_options(host)]
        return [*command, "--once", "--json", f"--max-bytes={ROOT_BYTES_MAX}"]

    def ready_count(self, host: Host) -> int:
        """Counts how often its worker has reported that it serves."""
        out = host.machine.logs / f"{WORKER}.out"
        return out.read_text().count("ready grpc=") if out.exists() else 0

    def leader(self) -> Host:
        """The host of etcd's leader; waits until there is one."""
        until_s = time.monotonic() + READY_S
        while (place := leader_of([host.member for host in self.hosts])) is None:
            assert time.monotonic() < until_s, "etcd has no leader"
        return self.hosts[place]

    def restart_master(self) -> None:
        """Ends the file system's master and starts it again: until it is back every mount hangs."""
        self.rack.stop(MASTER)
        self._master.start()

    def freeze(self, host: Host, service: str = ETCD) -> None:
        """SIGSTOP: it keeps its connections and answers nothing."""
        host.machine.send(service, signal.SIGSTOP)

    def thaw(self, host: Host, service: str = ETCD) -> None:
        """SIGCONT."""
        host.machine.send(service, signal.SIGCONT)

    def fill(self) -> None:
        """Somebody else writes to the file system, from all hosts, until it takes no more."""
        for host in self.hosts:
            # Most of it at once, under the file system, which would need a minute for it on a busy machine.
            self.rack.must(["sh", "-c", _BALLAST, str(self._ballast(host)), str(BALLAST_LEFT_BYTES >> 10)])
        with ThreadPoolExecutor(len(self.hosts)) as threads:
            for ended in threads.map(lambda host: host.machine.run(_filling(host), FILL_S), self.hosts):
                assert "No space left" in ended.log, f"the file system is not full: {ended.log}"

    def empty(self) -> None:
        """And takes it all away again."""
        for host in self.hosts:
            self.rack.must(["rm", "-f", str(self._ballast(host))])
        self.hosts[0].machine.must(["rm", "-r", JUNK])

    def papers(self, name: str) -> Papers:
        """Certificate and key of the engines, or of the operator."""
        return self._papers[name]

    # Parts

    def _host(self, number: int, name: str, addresses: Mapping[str, str]) -> Host:
        machine = Machine(name, self.folder / "logs" / name)
        papers = papers_of(self._authority, name, addresses[name])
        member = EtcdMember(machine, self._disks / f"{name}-etcd", papers, dict(addresses))
        files = MooseHost(
            machine, self._disks / f"{name}-chunks", self.folder / "settings" / name, addresses[name], RACK
        )
        return Host(number, machine, addresses[name], papers, member, files)

    def _ballast(self, host: Host) -> Path:
        return self._disks / f"{host.name}-chunks" / "ballast"

    def _plug_in(self, host: Host) -> None:
        """Switches it on, and puts a cable between it and the switch."""
        host.machine.boot(disks_of=self.rack)
        ends = ["name", host.name, "type", "veth", "peer", "name", "eth0", "netns", str(host.machine.pid)]
        self.rack.ip("link", "add", *ends)
        self.rack.ip("link", "set", host.name, "up")
        self.plug(host)
        host.machine.ip("address", "add", f"{host.address}/24", "dev", "eth0")
        host.machine.ip("link", "set", "eth0", "up")

    def _start_services(self, host: Host) -> None:
        self.start_worker(host)
        round_of = [sys.executable, "-m", "tests.cluster.cron", str(host.number), str(len(HOSTS)), str(CRON_S)]
        host.machine.start(CRON, [*round_of, *self.collecting(host)], environment=PYTHON)

    def _mount_disk(self, name: str, size_bytes: int) -> None:
        """A disk that outlives the host's power cuts, and has no room for more than this."""
        folder = self._disks / name
        folder.mkdir()
        self.rack.must(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)])


def papers_of(authority: Authority, name: str, *addresses: str) -> Papers:
    """A certificate for ``name`` at these IP addresses, shown by servers, members of etcd and clients alike."""
    places = [x509.IPAddress(ipaddress.ip_address(each)) for each in ("127.0.0.1", *addresses)]
    pair = authority.issue(name, x509.DNSName(name), *places)
    return Papers(authority.ca, pair.cert, pair.key)


def kvstore(*arguments: str) -> list[str]:
    """The command line of this checkout."""
    return [sys.executable, "-c", "from kvstore.cli.main import main; main()", *arguments]


def _filling(host: Host) -> list[str]:
    # One copy is enough of what nobody wants, and fills the disks in half the time.
    fill = f"mkdir -p {JUNK} && mfssetgoal 1 {JUNK} && exec dd if=/dev/zero of={JUNK}/{host.name} bs=256K"
    return ["sh", "-c", fill]


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster, switched off at the end whatever happens."""
    made = Cluster(folder)
    try:
        made.start()
        yield made
    finally:
        made.close()
