"""The processes of a chaos test: nodes, collectors, an auditor and etcd, over one root.

Without etcd they are those of one host.

Each can be stopped, killed and started again at any time; their promises and actions are in ``folder``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.errors import Unavailable
from kvstore.meta.embedded_etcd import EmbeddedEtcd
from kvstore.meta.etcd import EtcdMetadata
from kvstore.meta.store import MetadataStore
from tests.chaos.journal import COUNTS, Fact, Journals
from tests.kit.etcd import eventually, running_etcd
from tests.kit.patience import PATIENCE_S

WAIT_S = PATIENCE_S
SHARD_BITS = 4
FOUND_BROKEN = 3
"""Exit code of a node or auditor that found a promise broken."""


@dataclass
class Part:
    """One process, started again after each of its deaths."""

    name: str
    command: list[str]
    folder: Path
    has_journal: bool
    process: subprocess.Popen[bytes] | None = None
    starts_count: int = 0
    codes: list[int] = field(default_factory=list)
    """Exit codes of those that ended by themselves."""

    def start(self) -> None:
        """Starts it, unless it runs."""
        if self.is_running:
            return
        self.starts_count += 1
        base = self.folder / f"{self.name}.{self.starts_count:03}"
        own = ["--journal", f"{base}.journal"] if self.has_journal else []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with open(f"{base}.out", "wb") as out, open(f"{base}.log", "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self.command, *own], stdout=out, stderr=errors, env=environment
            )

    @property
    def is_running(self) -> bool:
        """True if it runs; records it if it ended by itself."""
        if self.process is None:
            return False
        code = self.process.poll()
        if code is None:
            return True
        self.codes.append(code)
        self.process = None
        return False

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self.is_running and self.process is not None:
            self.process.kill()
            code = self.process.wait(WAIT_S)
            if code != -signal.SIGKILL:
                self.codes.append(code)
            self.process = None

    def end(self, wait_s: float = WAIT_S) -> None:
        """SIGTERM, and waits for its end."""
        if self.process is not None:
            self.send(signal.SIGCONT)
            self.send(signal.SIGTERM)
            code = self.process.wait(wait_s)
            if not (code == -signal.SIGTERM and self._is_starting):
                self.codes.append(code)
            self.process = None

    @property
    def _is_starting(self) -> bool:
        """True until it has its journal: before, it may not have said yet how it ends, and has promised nothing."""
        return self.has_journal and not (self.folder / f"{self.name}.{self.starts_count:03}.journal").exists()


class Cast:
    """All of them."""

    def __init__(self, root: Path, folder: Path, etcd: EmbeddedEtcd | None = None, *, endpoints: str = "") -> None:
        """``endpoints`` are those of an etcd that is not theirs to attack; with neither they are of one host."""
        self.root = root
        self.folder = folder
        self._etcd = etcd
        self._endpoints = etcd.endpoints if etcd else endpoints
        self.parts: dict[str, Part] = {}
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def has_etcd(self) -> bool:
        """False for processes of one host."""
        return bool(self._endpoints)

    @property
    def etcd(self) -> EmbeddedEtcd:
        """Theirs."""
        assert self._etcd is not None, "these have none"
        return self._etcd

    def node(self, name: str, prompts: int, *options: str) -> Part:
        """A node that does a bit of everything."""
        command = ["tests.chaos.actor", *self._where(), "--prompts", str(prompts), *options]
        return self._add(name, command, has_journal=True)

    def collector(self, name: str, *options: str) -> Part:
        """``kvstore-gc``, which does not give way to other programs: on a busy machine it would not run for minutes."""
        return self._add(name, ["kvstore_gc", *self._where(), "--json", *options])

    def auditor(self) -> Part:
        """The one who looks at pins whose owners may be dead."""
        where = ["--root", str(self.root), "--shard-bits", str(SHARD_BITS), "--journals", str(self.folder)]
        return self._add("auditor", ["tests.chaos.auditor", *where], has_journal=True)

    def part(self, name: str, *command: str) -> Part:
        """Any other process, told where root and etcd are."""
        return self._add(name, [*command, *self._where()])

    def _where(self) -> list[str]:
        return ["--root", str(self.root), *(["--etcd", self._endpoints] if self._endpoints else [])]

    def _add(self, name: str, command: list[str], *, has_journal: bool = False) -> Part:
        part = self.parts[name] = Part(name, command, self.folder, has_journal)
        part.start()
        return part

    def meta(self) -> MetadataStore:
        """Returns a client of their etcd; close it."""
        return EtcdMetadata(self._endpoints)

    # etcd

    def kill_etcd(self) -> None:
        """SIGKILL."""
        if self._etcd is not None and self._etcd.running:
            os.kill(self.etcd.pid, signal.SIGKILL)
            eventually(lambda: not self.etcd.running)

    def signal_etcd(self, number: signal.Signals) -> None:
        """Sends it a signal, if it runs."""
        if self._etcd is None:
            return
        try:
            os.kill(self.etcd.pid, number)
        except (Unavailable, ProcessLookupError):
            pass

    # Their records

    @property
    def has_failed(self) -> bool:
        """True if a process has found a promise broken."""
        return any(not part.is_running and FOUND_BROKEN in part.codes for part in self.parts.values())

    def facts(self, *kinds: str) -> list[tuple[str, Fact]]:
        """All facts of these kinds, with the names of the journals."""
        return [(name, fact) for name, fact in Journals(self.folder).new() if fact["fact"] in kinds]

    def counts(self) -> Counter[str]:
        """Sums the counters of nodes and auditor."""
        last = dict(self.facts(COUNTS))
        total: Counter[str] = Counter()
        for fact in last.values():
            total.update({name: count for name, count in fact.items() if name not in ("fact", "at_s")})
        return total

    def rounds(self) -> Counter[str]:
        """Sums the collectors' reports on their rounds."""
        total: Counter[str] = Counter()
        for path in self.folder.glob("*.out"):
            for line in path.read_text().splitlines():
                if not (line.startswith("{") and line.endswith("}")):
                    continue  # killed in the middle of it
                summary = json.loads(line)
                total["rounds"] += 1
                if "deleted" in summary:  # of a host
                    total["deleted"] += summary["deleted"]
                    continue
                for key in ("condemned", "reaped"):
                    total[key] += summary[key]["chunks"]
                total.update({f"sweeps {name}": count for name, count in summary["sweeps"].items()})
                total.update({f"spared {name}": count for name, count in summary["spared"].items()})
                total.update({f"orphans {name}": count for name, count in summary["orphans"].items()})
        return total

    def tail(self, name: str, lines: int = 15) -> str:
        """The end of the newest log of a process."""
        newest = max(self.folder.glob(f"{name}.*.log"), default=None)
        return "" if newest is None else "\n".join(newest.read_text().splitlines()[-lines:])


@contextmanager
def cast(root: Path, folder: Path) -> Iterator[Cast]:
    """A cast with its own etcd; all of it is removed at the end."""
    with running_etcd(folder / "etcd") as etcd, _ended(Cast(root, folder / "cast", etcd)) as made:
        yield made


@contextmanager
def host_cast(root: Path, folder: Path) -> Iterator[Cast]:
    """A cast of one host, without etcd."""
    with _ended(Cast(root, folder / "cast")) as made:
        yield made


@contextmanager
def _ended(made: Cast) -> Iterator[Cast]:
    try:
        yield made
    finally:
        made.signal_etcd(signal.SIGCONT)
        for part in made.parts.values():
            part.kill()
