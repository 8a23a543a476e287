"""The engines' life on the cluster in scenes.

A scene ends well when every engine is served as before without help, every accepted pin is listed and readable from
every host, and no byte was wrong.
"""

from __future__ import annotations

import json
import os
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.replay import TraceRequest, expect, generate, load_trace, write_trace
from tests.cluster.cluster import ENGINE, PYTHON, ROOT_BYTES_MAX, Cluster, Host
from tests.cluster.figures import Diary, Figures
from tests.cluster.load import CONTENT, Reach

REQUESTS_MAX = 600
TRACE = "KVSTORE_CLUSTER_TRACE"
RECOVERY_S_MAX = 60.0
AUDIT_PATIENCE_S = 12.0
"""Shorter than an engine keeps a pin: one that is lost must not be given back before it is missed."""
AUDIT_S_MAX = 90.0
POLL_S = 0.25


@dataclass(slots=True)
class Scene:
    """One scene. ``healed_s`` is when the last cause of trouble was removed."""

    began_s: float
    healed_s: float
    figures: Figures | None = None
    pins: int = 0

    def healed(self) -> None:
        """Notes that nothing is in the way any more."""
        self.healed_s = time.monotonic()


class Story:
    """All scenes. Nothing runs before ``begin``."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.trace = cluster.folder / "load.jsonl"
        self.diary = Diary(cluster.journals)

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
        scene = Scene(now_s, now_s)
        yield scene
        well_s = self._wait_well(title, scene.healed_s)
        scene.figures = self.diary.between(scene.began_s, time.monotonic())
        with ThreadPoolExecutor(len(self.cluster.hosts)) as threads:
            audits = list(threads.map(self._audit_from, self.cluster.hosts))
        scene.pins = min(each["pins"] for each in audits)
        print(f"\n{title}: well again after {well_s:.1f} s, {scene.pins} pins: {scene.figures}")
        assert not scene.figures.wrong_bytes, "engines read wrong bytes"
        calls = {error.partition(":")[0] for error in scene.figures.errors}
        assert not {"match", "get"} & calls, f"what cannot be read is a miss: {scene.figures.errors}"
        for each in audits:
            assert not each["wrong_bytes"], f"wrong bytes under pins: {each}"
            assert not each["lost"], f"accepted pins are lost: {each}"

    def end(self) -> None:
        """Stops the engines."""
        for host in self.cluster.hosts:
            host.machine.stop(ENGINE)

    def _audit_from(self, host: Host) -> dict[str, Any]:
        """Reads every pin in force through one host's worker."""
        reach = self._reach(host.worker)
        command = [sys.executable, "-m", "tests.cluster.auditor", *reach.arguments(), "--trace", str(self.trace)]
        options = ["--journals", str(self.cluster.journals), "--patience-s", str(AUDIT_PATIENCE_S)]
        said: dict[str, Any] = json.loads(host.machine.must([*command, *options], AUDIT_S_MAX, PYTHON))
        return said

    def _reach(self, worker: str | None = None) -> Reach:
        return Reach(self.cluster.endpoints, self.cluster.papers(ENGINE), worker)

    def _wait_well(self, title: str, healed_s: float) -> float:
        """Seconds until the last engine was served as ever; asserts that it does not take for ever."""
        until_s = time.monotonic() + RECOVERY_S_MAX
        while True:
            well_s = [self.diary.well_since_s(host.name, healed_s) for host in self.cluster.hosts]
            found_s = [each for each in well_s if each is not None]
            if len(found_s) == len(well_s):
                return max(0.0, max(found_s) - healed_s)
            errors = self.diary.between(healed_s, time.monotonic()).errors.most_common(5)
            assert time.monotonic() < until_s, f"{title}: not all engines are well again: {errors}"
            time.sleep(POLL_S)


def requests_up_to(size_bytes: int) -> list[TraceRequest]:
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
