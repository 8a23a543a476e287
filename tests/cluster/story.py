"""The engines' life on the cluster in scenes: for each, what happened, what it cost, and how it ended.

A scene ends well when every engine is served as before without help, every accepted pin is listed and readable from
every host, and no byte was wrong.
"""

from __future__ import annotations

import json
import os
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.replay import Request, expect, generate, load_trace, write_trace
from tests.cluster.cluster import CRON, ENGINE, PYTHON, ROOT_BYTES_MAX, Cluster, Host
from tests.cluster.figures import Diary, Figures, table
from tests.cluster.load import CONTENT, Reach

REQUESTS_MAX = 600
TRACE = "KVSTORE_CLUSTER_TRACE"
RECOVERY_S_MAX = 60.0
AUDIT_PATIENCE_S = 12.0
"""Shorter than an engine keeps a pin: one that is lost must not be given back before it is missed."""
AUDIT_S_MAX = 90.0
POLL_S = 0.25
HEADS = (
    "scene",
    "s",
    "requests",
    "hits",
    "errors",
    "shed",
    "slowest s",
    "well again after s",
    "collected",
    "pins kept",
    "late",
    "wrong bytes",
)


@dataclass(slots=True)
class Scene:
    """One scene. ``healed_s`` is when the last cause of trouble was removed."""

    title: str
    began_s: float
    healed_s: float
    ended_s: float = 0.0
    figures: Figures | None = None
    recovered_s: dict[str, float] = field(default_factory=dict)
    audits: list[dict[str, Any]] = field(default_factory=list)
    collected: int = 0
    messages: Counter[str] = field(default_factory=Counter)

    def healed(self) -> None:
        """Notes that nothing is in the way any more."""
        self.healed_s = time.monotonic()

    def row(self) -> list[str]:
        """Returns the scene as a row of the table."""
        figures = self.figures
        assert figures is not None
        recovered = " ".join(f"{seconds:.1f}" for seconds in self.recovered_s.values())
        return [
            self.title,
            f"{figures.seconds:.0f}",
            f"{figures.requests}",
            f"{100 * figures.hit_ratio:.0f} %",
            f"{figures.errors.total()}",
            f"{figures.shed + figures.short}",
            f"{figures.slowest_s:.1f}",
            recovered,
            f"{self.collected}",
            f"{min((each['pins'] - len(each['lost']) for each in self.audits), default=0)}",
            f"{max((each['late'] for each in self.audits), default=0)}",
            f"{figures.wrong_bytes}",
        ]


class Story:
    """All scenes. Nothing runs before ``begin``."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.trace = cluster.folder / "load.jsonl"
        self.diary = Diary(cluster.journals)
        self.scenes: list[Scene] = []

    def begin(self) -> None:
        """Starts an engine on each host."""
        write_trace(self.trace, requests_up_to(3 * ROOT_BYTES_MAX))
        for host in self.cluster.hosts:
            self.start_engine(host)

    def start_engine(self, host: Host) -> None:
        """Starts it as a service of its host."""
        journal = self.cluster.journals / f"{host.name}.journal"
        command = [sys.executable, "-m", "tests.cluster.engine", *self._reach().arguments()]
        host.machine.start(
            ENGINE, [*command, "--trace", str(self.trace), "--journal", str(journal)], environment=PYTHON
        )

    def boot(self, host: Host) -> None:
        """Switches a host on again, with its engine."""
        self.cluster.boot(host)
        self.start_engine(host)

    @contextmanager
    def scene(self, title: str) -> Iterator[Scene]:
        """Runs a scene, which is the body of the context; its end waits until all is well, and checks closely."""
        now_s = time.monotonic()
        scene = Scene(title, now_s, now_s)
        rounds = self._collected()
        yield scene
        scene.recovered_s = self._wait_well(scene)
        scene.ended_s = time.monotonic()
        scene.figures = self.diary.between(scene.began_s, scene.ended_s)
        scene.messages = self.diary.errors(scene.began_s, scene.ended_s)
        scene.audits = self.audit()
        scene.collected = self._collected() - rounds
        self.scenes.append(scene)
        print(f"\n{table(HEADS, [scene.row()])}")
        for message, count in scene.messages.most_common(3):
            print(f"  {count} x {message[:180]}")
        assert not scene.figures.wrong_bytes, "engines read wrong bytes"
        assert not {"match", "get"} & set(scene.figures.errors), f"what cannot be read is a miss: {scene.messages}"
        for each in scene.audits:
            assert not each["wrong_bytes"], f"wrong bytes under pins: {each}"
            assert not each["lost"], f"accepted pins are lost: {each}"

    def audit(self) -> list[dict[str, Any]]:
        """Every pin in force, looked at from every host, through that host's worker."""
        with ThreadPoolExecutor(len(self.cluster.hosts)) as threads:
            return list(threads.map(self._audit_from, self.cluster.hosts))

    def end(self) -> None:
        """Stops the engines."""
        for host in self.cluster.hosts:
            host.machine.stop(ENGINE)

    def __str__(self) -> str:
        return table(HEADS, [each.row() for each in self.scenes])

    def _audit_from(self, host: Host) -> dict[str, Any]:
        reach = self._reach(host.worker)
        command = [sys.executable, "-m", "tests.cluster.auditor", *reach.arguments(), "--trace", str(self.trace)]
        options = ["--journals", str(self.cluster.journals), "--patience-s", str(AUDIT_PATIENCE_S)]
        said: dict[str, Any] = json.loads(host.machine.must([*command, *options], AUDIT_S_MAX, PYTHON))
        return said

    def _reach(self, worker: str | None = None) -> Reach:
        return Reach(self.cluster.endpoints, self.cluster.papers(ENGINE), worker)

    def _wait_well(self, scene: Scene) -> dict[str, float]:
        """Seconds until each engine was served as ever; asserts that it does not take for ever."""
        recovered: dict[str, float] = {}
        until_s = time.monotonic() + RECOVERY_S_MAX
        while len(recovered) < len(self.cluster.hosts):
            for host in self.cluster.hosts:
                well_s = self.diary.well_since_s(host.name, scene.healed_s)
                if well_s is not None:
                    recovered[host.name] = max(0.0, well_s - scene.healed_s)
            said = self.diary.errors(scene.healed_s, time.monotonic()).most_common(5)
            assert time.monotonic() < until_s, f"{scene.title}: only {sorted(recovered)} are well again: {said}"
            time.sleep(POLL_S)
        return {host.name: recovered[host.name] for host in self.cluster.hosts}

    def _collected(self) -> int:
        """Chunks that the cron job has deleted so far, on whichever host."""
        total = 0
        for host in self.cluster.hosts:
            total += sum(each["reaped"]["chunks"] for each in rounds_of(host.machine.logs / f"{CRON}.out"))
        return total


def requests_up_to(size_bytes: int) -> list[Request]:
    """Returns requests up to a number of bytes of KV: of the trace in the environment, or of a generated one."""
    path = os.environ.get(TRACE)
    requests = load_trace(path, REQUESTS_MAX) if path else generate(REQUESTS_MAX, seed=3, kind="agents")

    def bytes_of(count: int) -> int:
        return expect(requests[:count]).chunks_unique * CONTENT.layout.chunk_bytes

    return requests[: bisect_right(range(1, len(requests) + 1), size_bytes, key=bytes_of)]


def rounds_of(path: Path) -> list[dict[str, Any]]:
    """Returns the collectors' rounds on a host, one object each; a killed collector may have written half of one."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            pass
    return found
