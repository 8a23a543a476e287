"""``kvstore up``: everything on one host, watched over: etcd unless given, workers, the garbage collector."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstore.cli import logs
from kvstore.cli.access import EtcdAccess
from kvstore.cli.children import STOP_S, Program, gc_command, kill_all, kvstore_command, stop_all
from kvstore.cli.command import Command
from kvstore.cli.kinds import DURATION, HOST_PORT, SIZE, split
from kvstore.cli.options import durability_option, etcd_options, root_options_option, shard_bits_option
from kvstore.cli.rooted import local_path
from kvstore.cli.signals import Stopper
from kvstore.cli.tiering import tier_arguments, tier_options
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.memory.host import memory_most_bytes
from kvstore.node.settings import TierSettings

if TYPE_CHECKING:
    from kvstore.meta.server import EmbeddedEtcd

log = logging.getLogger(__name__)

WORKERS_MAX = 64
WATCH_S = 0.5
SHORT_LIFE_S = 10.0
"""A worker that lived shorter died of its start; three of those in a row, and ``up`` gives up."""
SHORT_LIVES_MAX = 3
GC_INTERVAL_S = 60
"""Between two rounds; one that is needed sooner, because the root fills up, begins at once."""


@click.command(
    cls=Command,
    no_args_is_help=True,
    short_help="Serve a root on this host: etcd, workers, garbage collection.",
)
@click.option("--root", required=True, metavar="URL", help="The root: a folder, file:///path, s3://bucket/prefix, ...")
@root_options_option
@click.option(
    "--listen",
    type=HOST_PORT,
    default="127.0.0.1:7070",
    show_default=True,
    metavar="HOST:PORT",
    help="Where the first worker listens, the next ones on the ports after it; port 0: any free ones.",
)
@click.option("--workers", type=click.IntRange(1, WORKERS_MAX), default=1, show_default=True, help="How many workers.")
@click.option(
    "--metrics",
    type=HOST_PORT,
    default="127.0.0.1:0",
    show_default=True,
    metavar="HOST:PORT",
    help="Where the first worker serves Prometheus metrics, the next ones on the ports after it.",
)
@etcd_options
@click.option(
    "--etcd-folder",
    metavar="FOLDER",
    help="Where the bundled etcd keeps its files; by default one for each root under ~/.local/state/kvstore.",
)
@durability_option
@tier_options
@shard_bits_option
@click.option(
    "--max-bytes",
    type=SIZE,
    metavar="SIZE",
    help="What chunks may take, such as 200GiB; by default all there is room for.",
)
@click.option("--ttl", "ttl_s", type=DURATION, metavar="TIME", help="Delete chunks that nobody used for so long.")
@click.option("--no-gc", is_flag=True, help="Delete nothing, ever: kvstore-gc runs elsewhere.")
@click.option("--drain", "drain_s", type=DURATION, default="10s", show_default=True, help="Time to finish at the end.")
@click.option("--log-level", type=click.Choice(logs.LEVELS), default="info", show_default=True)
def up(
    root: str,
    root_options_file: str | None,
    listen: str,
    workers: int,
    metrics: str,
    etcd: EtcdAccess | None,
    etcd_folder: str | None,
    durability: str,
    tiers: TierSettings,
    shard_bits: int,
    max_bytes: int | None,
    ttl_s: float | None,
    no_gc: bool,
    drain_s: float,
    log_level: str,
) -> None:
    """Serve ROOT on this host with everything that takes: etcd (unless --etcd is given), workers, and kvstore-gc,
    which deletes the least useful chunks before the root is full.

    Prints one line when it serves:

    \b
      ready grpc=HOST:PORT[,...] etcd=ENDPOINTS metrics=HOST:PORT[,...]

    Stops cleanly on SIGTERM or Ctrl-C: accepted puts are finished. A second signal stops at once. What dies is started
    again. The bundled etcd is for one host; a cluster that must survive a host has one of its own on three.

    \b
    Examples:
      kvstore up --root /mnt/kv --max-bytes 200GiB
      kvstore up --root /mnt/kv --listen 0.0.0.0:7070 --workers 2 --etcd 10.0.0.5:2379 --ttl 7d
    """
    if no_gc and (max_bytes is not None or ttl_s is not None):
        raise InvalidRequest("--max-bytes and --ttl are for garbage collection, --no-gc does without: give one of them")
    if workers * tiers.memory_bytes > memory_most_bytes():
        raise InvalidRequest(
            f"--memory is for each worker: {workers} * {tiers.memory_bytes} bytes, and this host or container has at "
            f"most {memory_most_bytes()} for it; give less, or fewer --workers"
        )
    logs.configure(log_level)
    programs: list[Program] = []
    with ExitStack() as undo:
        stopper = undo.enter_context(Stopper(at_once=lambda: kill_all(programs)))
        endpoints, common, server = undo.enter_context(_metadata(root, etcd, etcd_folder))
        common += ["--root", root, "--log-level", log_level]
        if root_options_file is not None:
            common += ["--root-options", root_options_file]
        undo.callback(lambda: stop_all(programs, drain_s + STOP_S))
        serving = ["--durability", durability, "--shard-bits", str(shard_bits), "--drain", f"{drain_s}s"]
        cluster = _Cluster([*common, *serving], tiers, listen, metrics, stopper)
        try:
            cluster.start(workers, programs)
        except Unavailable:
            if stopper.asked:
                return
            raise
        collector = None if no_gc else _start_gc(common, max_bytes, ttl_s, programs)
        print(
            f"ready grpc={','.join(cluster.said('grpc'))} etcd={endpoints} metrics={','.join(cluster.said('metrics'))}",
            flush=True,
        )
        cluster.watch(server, collector)
        log.info("up.stopping")


@dataclass(slots=True)
class _Worker:
    program: Program
    said: dict[str, str]
    short_lives: int = 0


class _Cluster:
    """The workers of this host; those that die are started again at their address."""

    def __init__(self, arguments: list[str], tiers: TierSettings, listen: str, metrics: str, stopper: Stopper) -> None:
        self._arguments = arguments
        self._tiers = tiers
        self._listen = split(listen)
        self._metrics = split(metrics)
        self._stopper = stopper
        self._workers: list[_Worker] = []

    def start(self, count: int, programs: list[Program]) -> None:
        """Starts them all and waits until they serve. Raises Unavailable where one does not."""
        for number in range(count):
            command = self._command(number, _address(self._listen, number), _address(self._metrics, number))
            program = Program(f"worker {number}", command)
            programs.append(program)
            program.start()
        for program in programs:
            self._workers.append(_Worker(program, program.wait_ready(lambda: self._stopper.asked)))

    def said(self, key: str) -> list[str]:
        """One value of each worker's ready line."""
        return [each.said[key] for each in self._workers]

    def watch(self, server: EmbeddedEtcd | None, collector: Program | None) -> None:
        """Returns when a signal came. Raises Unavailable where a worker keeps dying, or the bundled etcd does."""
        while not self._stopper.wait(WATCH_S):
            if server is not None and not server.running:
                log.error("up.etcd_ended: starting it again")
                server.start()  # on the same ports, with the same files: workers find it again
            waited = collector is not None and time.monotonic() - collector.started_s > GC_INTERVAL_S
            if collector is not None and waited and not collector.running:
                log.error("up.gc_ended exit_code=%s: starting it again", collector.exit_code)
                collector.start()
            for number, worker in enumerate(self._workers):
                if not worker.program.running:
                    self._again(number, worker)

    def _again(self, number: int, worker: _Worker) -> None:
        program = worker.program
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
        tiers = tier_arguments(self._tiers, number)
        return kvstore_command("worker", "--listen", listen, "--metrics", metrics, *self._arguments, *tiers)


def _address(first: tuple[str, int], number: int) -> str:
    """``number`` ports after the first; any free one for all where the first is 0."""
    host, port = first
    if port and port + number > 65535:
        raise InvalidRequest(f"port {port} leaves no room for {number} more workers: give a lower one, or 0")
    return f"{f'[{host}]' if ':' in host else host}:{port + number if port else 0}"


@contextmanager
def _metadata(
    root: str, etcd: EtcdAccess | None, folder: str | None
) -> Iterator[tuple[str, list[str], EmbeddedEtcd | None]]:
    """The endpoints, the arguments that bring a worker there, and the bundled etcd where none is given."""
    if etcd is not None:
        if folder is not None:
            raise InvalidRequest("--etcd-folder is for the bundled etcd, --etcd names another: give one of them")
        context = click.get_current_context()
        arguments = ["--etcd", etcd.endpoints]
        for option in ("etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file"):
            if context.params.get(option):
                arguments += [f"--{option.replace('_', '-')}", context.params[option]]
        yield etcd.endpoints, arguments, None
        return
    from kvstore.meta.server import EmbeddedEtcd

    path = Path(folder) if folder else state_folder(root)
    with _locked(path), EmbeddedEtcd(path) as server:
        log.info("up.etcd endpoints=%s folder=%s", server.endpoints, path)
        yield server.endpoints, ["--etcd", server.endpoints], server


def state_folder(root: str) -> Path:
    """Where the bundled etcd of a root keeps its files: ``$XDG_STATE_HOME``, else ``~/.local/state``."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    key = local_path(root) or root
    return Path(base) / "kvstore" / f"etcd-{blake2b(key.encode(), digest_size=8).hexdigest()}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One ``up`` at a time in a folder: a second etcd would wait for the first one's files without saying so."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder / "up.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as cause:
        raise InvalidRequest(f"cannot use {folder} for etcd's files ({cause.strerror}): give --etcd-folder") from cause
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            raise Unavailable(
                f"another kvstore up uses {folder}: stop it first, or start workers beside it with kvstore worker"
            ) from cause
        yield
    finally:
        os.close(descriptor)


def _start_gc(common: list[str], max_bytes: int | None, ttl_s: float | None, programs: list[Program]) -> Program | None:
    """The garbage collector. After the workers: there is a root then, and what it and etcd know of each other."""
    command = gc_command(*common, "--interval", f"{GC_INTERVAL_S}s")
    if command is None:
        log.warning(
            "up.no_gc garbage collection is not installed: nothing is ever deleted, watch the root's free space"
        )
        return None
    if max_bytes is not None:
        command += ["--max-bytes", str(max_bytes)]
    if ttl_s is not None:
        command += ["--ttl", f"{ttl_s}s"]
    program = Program("gc", command)
    programs.append(program)
    program.start()
    return program
