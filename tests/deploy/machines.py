"""Machines for the guide: whole Debian systems with systemd, a network namespace and a shell each, on one host.

Separate from the test because this is plumbing: debootstrap makes one tree, overlayfs gives each machine its own view
of it, systemd-nspawn boots them, and a bridge in its own namespace joins them. Needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.kit.patience import eventually

SOURCE = Path(__file__).resolve().parents[2]
CACHE = SOURCE / ".cache" / "guide"
TOOLS = ("debootstrap", "systemd-nspawn", "nsenter", "ip")
PACKAGES = "systemd,systemd-sysv,dbus,python3,python3-venv,gcc,libc6-dev,openssl,curl,etcd-server,etcd-client,iproute2"
NETWORK = "10.77.0"
BOOT_S = 60.0
STOP_S = 20.0
_MARK = "block-ended"

SCP = """\
#!/bin/sh
# Copies without ssh: root@HOST:PATH is below /srv/machines/HOST.
for argument; do
    shift
    case $argument in
    -*) ;;
    root@*:*) host=${argument#root@}; set -- "$@" "/srv/machines/${host%%:*}${host#*:}" ;;
    *) set -- "$@" "$argument" ;;
    esac
done
exec cp -r "$@"
"""


def why_not() -> str | None:
    """Why machines cannot be started here, or None."""
    if os.geteuid() != 0:
        return "needs root: network namespaces, mounts and systemd-nspawn"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"needs {', '.join(missing)}: apt-get install debootstrap systemd-container iproute2" if missing else None


@dataclass(slots=True)
class Machine:
    """One booted system; ``run`` types into its shell."""

    name: str
    shell: subprocess.Popen[str]

    def run(self, block: str) -> str:
        """Types ``block`` and waits for its end; returns its output. Raises AssertionError if a command failed."""
        assert self.shell.stdin is not None and self.shell.stdout is not None
        trap = "failed=; trap 'failed=$BASH_COMMAND' ERR"
        self.shell.stdin.write(f"{trap}\n{{\n{block}\n}} </dev/null\nprintf '\\n%s %s\\n' {_MARK} \"$failed\"\n")
        self.shell.stdin.flush()
        printed: list[str] = []
        for line in self.shell.stdout:
            if line.startswith(_MARK):
                failed = line.removeprefix(_MARK).strip()
                assert not failed, f"on {self.name}: {failed}\n" + "".join(printed)
                return "".join(printed)
            printed.append(line)
        raise AssertionError(f"the shell of {self.name} ended:\n" + "".join(printed))


def tree() -> Path:
    """A Debian system with the packages of the guide's first block; made once."""
    made = CACHE / "tree"
    if not made.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=CACHE))
        fresh.chmod(0o755)
        _do("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(fresh))
        (fresh / "etc/apt/sources.list").write_text("")
        fresh.rename(made)
    return made


def wheels() -> Path:
    """Every locked package, as files: the machines have no network."""
    lock = SOURCE / "requirements.lock"
    folder = CACHE / "wheels"
    done = folder / ".lock"
    if not done.exists() or done.read_text() != lock.read_text():
        shutil.rmtree(folder, ignore_errors=True)
        python = str(SOURCE / ".venv" / "bin" / "python")
        _do(python, "-m", "pip", "download", "--quiet", "--require-hashes", "-r", str(lock), "-d", str(folder))
        done.write_text(lock.read_text())
    return folder


@contextmanager
def machines(names: Sequence[str]) -> Iterator[dict[str, Machine]]:
    """Boots machines at 10.77.0.1 and so on: this checkout in /srv/kvstore, one folder as everybody's /mnt/kv."""
    with ExitStack() as undo:
        place = Path(tempfile.mkdtemp(prefix="kvstore-guide-"))
        undo.callback(shutil.rmtree, place, ignore_errors=True)
        (place / "root").mkdir()
        _network(undo, names)
        folders = {name: _folder(undo, place, name, names) for name in names}
        leaders = {name: _boot(undo, place, name, folder, folders) for name, folder in folders.items()}
        yield {name: Machine(name, _shell(undo, name, leader)) for name, leader in leaders.items()}


def _network(undo: ExitStack, names: Sequence[str]) -> None:
    """Makes a bridge in its own namespace, and a namespace with one end of a cable for each machine."""
    tag = f"kvg{os.getpid()}"
    _do("ip", "netns", "add", tag)
    undo.callback(_try, "ip", "netns", "del", tag)
    _do("ip", "-n", tag, "link", "add", "br0", "type", "bridge")
    _do("ip", "-n", tag, "link", "set", "br0", "up")
    for number, name in enumerate(names, 1):
        space = f"{tag}-{name}"
        _do("ip", "netns", "add", space)
        undo.callback(_try, "ip", "netns", "del", space)
        _do("ip", "-n", tag, "link", "add", f"to-{name}", "type", "veth", "peer", "name", "host0", "netns", space)
        _do("ip", "-n", tag, "link", "set", f"to-{name}", "master", "br0", "up")
        _do("ip", "-n", space, "address", "add", f"{NETWORK}.{number}/24", "dev", "host0")
        for device in ("lo", "host0"):
            _do("ip", "-n", space, "link", "set", device, "up")


def _folder(undo: ExitStack, place: Path, name: str, names: Sequence[str]) -> Path:
    """A machine's own view of the tree, with the setup that the host's owner would have made."""
    above, work, merged = (place / name / part for part in ("above", "work", "merged"))
    for folder in (above, work, merged):
        folder.mkdir(parents=True)
    _do("mount", "-t", "overlay", "overlay", "-o", f"lowerdir={tree()},upperdir={above},workdir={work}", str(merged))
    undo.callback(_try, "umount", "--lazy", str(merged))
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=SOURCE, capture_output=True, check=True).stdout.decode()
    for path in filter(None, listed.split("\0")):
        if (SOURCE / path).is_file():
            (merged / "srv/kvstore" / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(SOURCE / path, merged / "srv/kvstore" / path)
    hosts = "".join(f"{NETWORK}.{number} {each}\n" for number, each in enumerate(names, 1))
    (merged / "etc/hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
    (merged / "etc/hostname").write_text(f"{name}\n")
    (merged / "etc/pip.conf").write_text(
        "[global]\nno-index = true\nfind-links = /srv/wheels\ndisable-pip-version-check = true\n"
    )
    scp = merged / "usr/local/bin/scp"
    scp.write_text(SCP)
    scp.chmod(0o755)
    return merged


def _boot(undo: ExitStack, place: Path, name: str, folder: Path, folders: dict[str, Path]) -> int:
    """Starts a machine; the pid of its init."""
    command = [
        "systemd-nspawn",
        "--quiet",
        "--boot",
        "--register=no",
        "--keep-unit",
        f"--machine=kvg{os.getpid()}{name}",
        f"--directory={folder}",
        f"--hostname={name}",
        "--resolv-conf=off",
        "--link-journal=no",
        "--console=read-only",
        f"--network-namespace-path=/run/netns/kvg{os.getpid()}-{name}",
        f"--bind={place / 'root'}:/mnt/kv",
        f"--bind-ro={wheels()}:/srv/wheels",
        *(f"--bind-ro={other}:/srv/machines/{each}" for each, other in folders.items() if each != name),
    ]
    with (place / f"{name}.log").open("wb") as log:
        container = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    undo.callback(_halt, container)
    children = Path(f"/proc/{container.pid}/task/{container.pid}/children")
    eventually(lambda: children.read_text().split(), f"the init of {name} (see {place}/{name}.log)", BOOT_S)
    return int(children.read_text().split()[-1])


def _is_up(leader: int) -> bool:
    state = subprocess.run(
        [*_enter(leader), "systemctl", "is-system-running"], capture_output=True, text=True, check=False
    )
    return state.stdout.strip() in ("running", "degraded")


def _shell(undo: ExitStack, name: str, leader: int) -> subprocess.Popen[str]:
    eventually(lambda: _is_up(leader), f"the boot of {name}", BOOT_S)
    shell = subprocess.Popen(
        [
            *_enter(leader),
            "env",
            "-i",
            "HOME=/root",
            "LANG=C.UTF-8",
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "bash",
            "--norc",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    undo.callback(shell.wait, STOP_S)
    undo.callback(shell.kill)
    return shell


def _enter(leader: int) -> list[str]:
    return ["nsenter", "--target", str(leader), "--mount", "--uts", "--ipc", "--net", "--pid"]


def _halt(container: subprocess.Popen[bytes]) -> None:
    """Ends a machine in good order (nspawn passes SIGTERM on as a request to power off), or at once."""
    container.send_signal(signal.SIGTERM)
    try:
        container.wait(STOP_S)
    except subprocess.TimeoutExpired:
        container.kill()
        container.wait()


def _do(*command: str) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{' '.join(command)}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}"


def _try(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=False)
