"""The programs of ``kvstore up``: workers, collector, dashboard and publisher, each started again when it dies."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvstore.cli.dashboard import PageAccess
from kvstore.cli.events import EventAddresses
from kvstore.cli.options import StorageLimits, arguments, split
from kvstore.cli.selectors import identified
from kvstore.cli.signals import Stopper
from kvstore.cli.worker import WorkerOptions
from kvstore.core.process import STOP_S, Program, gc_command, stop_all
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.meta.keys import Keys
from kvstore.meta.usage import Capacity
from kvstore.security.tls import is_loopback, joined

if TYPE_CHECKING:
    from kvstore.meta.embedded_etcd import EmbeddedEtcd


# Command lines of the programs that commands start, with the same interpreter as this one.


def kvstore_command(*arguments: str) -> list[str]:
    """The command line that runs ``kvstore``."""
    return [sys.executable, "-m", "kvstore.cli.main", *arguments]


log = logging.getLogger(__name__)

GC_INTERVAL_S = 60
"""Time between two rounds; an urgent one, because the root fills up, begins immediately."""
COUNTED_S = 60.0
"""How long the collector may take to list the root before the ready line: after a crash it waits for the record of the
one before."""
COUNTED_LOOK_S = 0.1
WATCH_S = 0.5
SHORT_LIFE_S = 10.0
"""A worker that lived shorter than this failed to start. After three of these in a row ``up`` gives up."""
SHORT_LIVES_MAX = 3
AGAIN_S = 1.0
"""Pause before a program that is no worker starts again."""


@dataclass(slots=True)
class _Worker:
    program: Program
    said: dict[str, str]
    short_lives: int = 0
    is_drained: bool = False


@dataclass(slots=True)
class _Other:
    program: Program
    due_s: float | None = None
    """Time (monotonic) at which it is started again; None while it runs."""


class Supervisor:
    """The workers of this host, and their helper programs. Adds each program that it starts to ``programs``."""

    def __init__(
        self,
        serving: WorkerOptions,
        drain_s: float,
        stopper: Stopper,
        programs: list[Program],
        counted_s: float = COUNTED_S,
    ) -> None:
        self._serving = serving
        self._counted_s = counted_s
        self._drain_s = drain_s
        self._stopper = stopper
        self._programs = programs
        self._workers: list[_Worker] = []
        self._others: list[_Other] = []

    def start(self, count: int, listen: str, metrics: str) -> None:
        """Starts the workers and waits until they serve. Raises Unavailable if one does not."""
        for number in range(count):
            command = self._command(number, numbered(listen, number), numbered(metrics, number))
            program = Program(f"worker {number}", command)
            self._programs.append(program)
            log.info("up.starting name=%s root=%s", program.name, self._serving.cluster.root)
            program.start()
        for program in list(self._programs):
            self._workers.append(_Worker(program, program.wait_ready(lambda: self._stopper.asked)))
            took_s = time.monotonic() - program.started_s
            log.info("up.started name=%s after_s=%.1f", program.name, took_s)

    def start_gc(self, room: StorageLimits, metrics: str | None) -> str:
        """Starts the garbage collector, if it is installed. After the workers, which make the root.

        Returns its part of the ready line: where its metrics are, if ``metrics`` is given. Raises Unavailable if those
        are not served.
        """
        command = gc_command(*self._common(room), "--interval", f"{GC_INTERVAL_S}s")
        if command is None:
            log.warning(
                "up.no_gc garbage collection is not installed: nothing is ever deleted, watch the root's free space"
            )
            return ""
        said = ""
        if metrics is None:
            self._start_beside("gc", command)
        else:
            program = self._start_beside("gc", [*command, "--metrics", metrics])
            bound = program.wait_ready(lambda: self._stopper.asked)["metrics"]
            program.command = [*command, "--metrics", bound]  # at the same port, should it die
            said = f" gc-metrics={bound}"
        if room.max_bytes is not None:
            self._await_count()
        return said

    def _await_count(self) -> None:
        """Waits until the collector has listed the root and publishes credits: writers are limited from then on."""
        cluster, ends_s = self._serving.cluster, time.monotonic() + self._counted_s
        if cluster.etcd is None:
            return
        # What cannot be asked is no reason to end: the workers serve.
        with suppress(KVStoreError):
            with identified(cluster.root, cluster.root_options.read()) as (_, identity):
                keys = Keys(identity.root)
            with closing(cluster.etcd.open()) as meta:
                while time.monotonic() < ends_s and not self._stopper.wait(COUNTED_LOOK_S):
                    found = meta.get(keys.gc_capacity)
                    if found is not None and Capacity.from_json(found.value).credit_bytes is not None:
                        return
        if not self._stopper.asked:
            log.warning(
                "up.uncounted the collector has not listed the root within %g s: until it has, puts have no limit",
                self._counted_s,
            )

    def start_dashboard(self, room: StorageLimits, listen: str) -> str:
        """Starts the dashboard of the same root and etcd; returns its URL. Raises Unavailable if it does not serve.

        If other hosts can reach it, it uses the workers' certificate and access file.
        """
        secured = self._serving.secured
        common = [*self._common(room), *arguments(secured.as_client())]
        if not is_loopback(listen):
            page = PageAccess(secured.own.cert_file, secured.own.key_file, secured.access_file, secured.insecure)
            common += arguments(page)
        program = self._start_beside("dashboard", kvstore_command("dashboard", "--listen", listen, *common))
        url = program.wait_ready(lambda: self._stopper.asked)["dashboard"]
        bound = joined(split(listen)[0], int(url.rstrip("/").rpartition(":")[2]))
        program.command = kvstore_command("dashboard", "--listen", bound, *common)  # at the same port, should it die
        return url

    def start_events(self, endpoints: EventAddresses) -> str:
        """Starts a publisher of the root's KV events; returns its part of the ready line. Raises Unavailable."""

        def command(at: EventAddresses) -> list[str]:
            serving = self._serving
            return kvstore_command("events", *arguments(serving.cluster), *arguments(serving.logging), *arguments(at))

        program = self._start_beside("events", command(endpoints))
        said = program.wait_ready(lambda: self._stopper.asked)
        # At the same ports, should it die: subscribers stay, and ask for what they missed.
        program.command = command(
            replace(endpoints, publish=said["publish"], replay=said["replay"] or None, query=said["query"])
        )
        return "".join(f" {name}={said[name]}" for name in ("publish", "replay", "query"))

    def said(self, key: str) -> list[str]:
        """One value of each worker's ready line."""
        return [each.said[key] for each in self._workers]

    def stop(self) -> None:
        """Ends the workers, then the helper programs: puts that workers accepted may need space from the collector."""
        others = [each.program for each in self._others]
        stop_all([each for each in self._programs if each not in others], self._drain_s + STOP_S)
        stop_all(others)

    def watch(self, server: EmbeddedEtcd | None) -> None:
        """Returns when a signal came. Raises Unavailable if a worker, or the embedded etcd, keeps dying."""
        while not self._stopper.wait(WATCH_S):
            if server is not None and not server.running:
                log.error("up.etcd_ended: starting it again")
                server.start()  # on the same ports, with the same files: workers find it again
            for other in self._others:
                if not other.program.running:
                    _start_later(other)
            for number, worker in enumerate(self._workers):
                if not worker.program.running and not worker.is_drained:
                    self._again(number, worker)

    def _again(self, number: int, worker: _Worker) -> None:
        program = worker.program
        if program.exit_code == 0:
            # It was asked to end (SIGTERM), so it must not come back.
            worker.is_drained = True
            log.warning("up.worker_drained name=%s: kvstore up does not restart it", program.name)
            return
        lived_s = time.monotonic() - program.started_s
        worker.short_lives = worker.short_lives + 1 if lived_s < SHORT_LIFE_S else 1
        if worker.short_lives > SHORT_LIVES_MAX:
            raise Unavailable(f"{program.name} ended {worker.short_lives} times soon after its start: see its messages")
        log.error("up.worker_ended name=%s exit_code=%s: starting it again", program.name, program.exit_code)
        program.command = self._command(number, worker.said["grpc"], worker.said["metrics"])
        program.start()
        try:
            program.wait_ready(lambda: self._stopper.asked)
        except Unavailable as error:
            if not self._stopper.asked:
                log.error("up.worker_failed %s", error)

    def _command(self, number: int, listen: str, metrics: str) -> list[str]:
        serving = replace(
            self._serving,
            tiers=self._serving.tiers.of_worker(number),
            secured=self._serving.secured.of_worker(number),
        )
        here = ["--listen", listen, "--metrics", metrics, "--drain", f"{self._drain_s}s"]
        return kvstore_command("worker", *here, *arguments(serving))

    def _common(self, room: StorageLimits) -> list[str]:
        serving = self._serving
        return [*arguments(serving.cluster), *arguments(serving.logging), *arguments(room)]

    def _start_beside(self, name: str, command: list[str]) -> Program:
        program = Program(name, command)
        self._programs.append(program)
        self._others.append(_Other(program))
        log.info("up.starting name=%s", name)
        program.start()
        return program


def _start_later(other: _Other) -> None:
    """Starts an ended program again once its time has come; the first call says when that is."""
    program, now_s = other.program, time.monotonic()
    if other.due_s is None:
        other.due_s = now_s + AGAIN_S
        log.error("up.%s_ended exit_code=%s: starting it again in %g s", program.name, program.exit_code, AGAIN_S)
    elif now_s >= other.due_s:
        other.due_s = None
        program.start()


def numbered(first: str, number: int) -> str:
    """``number`` ports after the first; any free one for all where the first is 0."""
    host, port = split(first)
    if port and port + number > 65535:
        raise InvalidRequest(f"port {port} leaves no room for {number} more workers: give a lower one, or 0")
    return joined(host, port + number if port else 0)
