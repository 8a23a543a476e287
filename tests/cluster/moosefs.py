"""MooseFS: its master in the rack, a chunk server and a mount on each host, every file of the store on two of them.

Chosen because it keeps its promises (gc/PROTOCOL.md: a removed folder stays removed) and is there in two seconds.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.cluster.machine import Machine
from tests.kit.etcd import eventually

PROGRAMS = ("mfsmaster", "mfschunkserver", "mfsmount", "mfssetgoal", "mfssettrashtime")
PACKAGES = "moosefs-master moosefs-chunkserver moosefs-client"
COPIES = 2
MOUNT = "/mnt/kv"
MASTER, CHUNKS, CLIENT = "mfsmaster", "mfschunkserver", "mfsmount"
"""Names of the services."""
OPTIONS = "mfserroronnospace"
"""Without it a write to a full file system is tried again for minutes, and all other calls queue up behind it."""
MOUNT_S = 20.0


def missing_programs() -> list[str]:
    """Returns the programs that would have to be installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


class MooseMaster:
    """The master: names, attributes, and where chunks lie. ``disk`` keeps its files, ``settings`` its configuration."""

    def __init__(self, machine: Machine, disk: Path, settings: Path, network: str) -> None:
        self._machine = machine
        self._disk = disk
        self._settings = settings
        self._network = network

    def prepare(self) -> None:
        """Once: an empty file system, which every host may use."""
        exports = _write(self._settings / "exports.cfg", f"{self._network} / rw,alldirs,admin,maproot=0:0")
        topology = _write(self._settings / "topology.cfg", "")
        self._machine.must(["sh", "-c", 'mkdir "$0" && printf "MFSM NEW" > "$0/metadata.mfs"', f"{self._disk}/master"])
        _config(
            self._settings / "master.cfg",
            DATA_PATH=self._disk / "master",
            EXPORTS_FILENAME=exports,
            TOPOLOGY_FILENAME=topology,
            # By default deleted files take room for up to five minutes, and go ten pieces a second.
            CHUNKS_LOOP_MIN_TIME=2,
            CHUNKS_SOFT_DEL_LIMIT=500,
            CHUNKS_HARD_DEL_LIMIT=1000,
        )

    def start(self) -> None:
        """Starts it with the state that it had when it ended."""
        # -a: after it was killed it reads its change logs.
        self._machine.start(MASTER, ["mfsmaster", "-f", "-a", "-c", str(self._settings / "master.cfg"), "start"])


class MooseHost:
    """A host's part: room for chunks on ``disk``, and the mount. ``settings`` is the folder of its configuration."""

    def __init__(self, machine: Machine, disk: Path, settings: Path, address: str, master: str) -> None:
        self._machine = machine
        self._disk = disk
        self._settings = settings
        self._address = address
        self._master = master

    def start(self) -> None:
        """Starts both; they retry until the master is there."""
        self.start_chunks()
        # Remains of a mount whose program died must go first.
        mount = f"umount -l {MOUNT} 2>/dev/null; mkdir -p {MOUNT} && exec mfsmount -f {MOUNT} -H {self._master}"
        self._machine.start(CLIENT, ["sh", "-c", f"{mount} -o {OPTIONS}"])

    def start_chunks(self) -> None:
        """Starts the chunk server."""
        folder, chunks = self._disk / "chunkserver", self._disk / "chunks"
        self._machine.must(["mkdir", "-p", str(folder), str(chunks)])
        config = _config(
            self._settings / "chunkserver.cfg",
            DATA_PATH=folder,
            HDD_CONF_FILENAME=_write(self._settings / "hdd.cfg", f"{chunks}"),
            HDD_LEAVE_SPACE_DEFAULT="16MiB",
            MASTER_HOST=self._master,
            CSSERV_LISTEN_HOST=self._address,
            MASTER_RECONNECTION_DELAY=1,
        )
        self._machine.start(CHUNKS, ["mfschunkserver", "-f", "-c", str(config), "start"])

    def wait_mounted(self) -> None:
        """Until the mount is there."""
        eventually(lambda: self._machine.run(["mountpoint", "-q", MOUNT]).code == 0, patience_s=MOUNT_S)

    def settle(self) -> None:
        """Sets up the whole file system, once: two copies of everything, and deleted files are gone at once."""
        # Chunk servers report to the master a moment after they have started: until then nothing can be written.
        trial = ["sh", "-c", f"echo trial > {MOUNT}/trial && rm {MOUNT}/trial"]
        eventually(lambda: self._machine.run(trial).code == 0, patience_s=MOUNT_S)
        self._machine.must(["mfssetgoal", "-r", str(COPIES), MOUNT])
        self._machine.must(["mfssettrashtime", "-r", "0", MOUNT])


def _config(path: Path, **settings: object) -> Path:
    common = {"WORKING_USER": "root", "WORKING_GROUP": "root", "LOCK_MEMORY": 0, "SYSLOG_IDENT": path.stem}
    return _write(path, "\n".join(f"{name} = {value}" for name, value in {**common, **settings}.items()))


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    return path
