"""``kvstore up``: everything on one host, watched over: etcd unless given, workers, the garbage collector."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstore.cli import logs
from kvstore.cli.access import EtcdAccess
from kvstore.cli.beside import start_dashboard, start_gc
from kvstore.cli.children import STOP_S, Program, kill_all, kvstore_command, stop_all
from kvstore.cli.command import Command
from kvstore.cli.kinds import DURATION, HOST_PORT, SIZE, split
from kvstore.cli.options import (
    durability_option,
    etcd_arguments,
    etcd_options,
    keys_option,
    label_option,
    log_format_option,
    log_level_option,
    root_options_option,
    shard_bits_option,
    tracing_option,
)
from kvstore.cli.rooted import local_path
from kvstore.cli.securing import ServerAccess, server_arguments, server_options
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
AGAIN_S = 60.0
"""From one start of the collector or the dashboard to the next, where it ends by itself."""


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
@click.option("--gc-metrics", type=HOST_PORT, metavar="HOST:PORT", help="Where kvstore-gc serves Prometheus metrics.")
@click.option("--dashboard", type=HOST_PORT, metavar="HOST:PORT", help="Where to serve the dashboard; else nowhere.")
@server_options
@log_level_option
@keys_option
@label_option
@log_format_option
@tracing_option
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
    keys_file: str | None,
    max_bytes: int | None,
    ttl_s: float | None,
    no_gc: bool,
    drain_s: float,
    gc_metrics: str | None,
    dashboard: str | None,
    label: str,
    secured: ServerAccess,
    log_level: str,
    log_format: str,
    tracing: bool | None,
) -> None:
    """Serve ROOT on this host with everything that takes: etcd (unless --etcd is given), workers, and kvstore-gc,
    which deletes the least useful chunks before the root is full.

    Prints one line when it serves:

    \b
      ready grpc=HOST:PORT[,...] etcd=ENDPOINTS metrics=HOST:PORT[,...] [dashboard=URL]

    Stops cleanly on SIGTERM or Ctrl-C: accepted puts are finished. A second signal stops at once. What dies is started
    again. The bundled etcd is for one host; a cluster that must survive a host has one of its own on three.

    \b
    Examples:
      kvstore up --root /mnt/kv --max-bytes 200GiB
      kvstore up --root /mnt/kv --listen 0.0.0.0:7070 --workers 2 --etcd 10.0.0.5:2379 --ttl 7d \\
          --tls-cert node7.crt --tls-key node7.key --tls-client-ca ca.crt --access access.json
    """
    if no_gc and not (max_bytes is None and ttl_s is None and gc_metrics is None):
        raise InvalidRequest(
            "--max-bytes, --ttl and --gc-metrics are for garbage collection, --no-gc does without: give one of them"
        )
    if workers * tiers.memory_bytes > memory_most_bytes():
        raise InvalidRequest(
            f"--memory is for each worker: {workers} * {tiers.memory_bytes} bytes, and this host or container has at "
            f"most {memory_most_bytes()} for it; give less, or fewer --workers"
        )
    secured.check([listen, metrics, *(each for each in (gc_metrics, dashboard) if each is not None)])
    secured.make_private(keeps_keys=keys_file is not None)
    logs.configure(log_level, log_format)
    programs: list[Program] = []
    with ExitStack() as undo:
        stopper = undo.enter_context(Stopper(at_once=lambda: kill_all(programs)))
        endpoints, common, server = undo.enter_context(_metadata(root, etcd, etcd_folder))
        common += ["--root", root, "--log-level", log_level, "--log-format", log_format]
        if root_options_file is not None:
            common += ["--root-options", root_options_file]
        undo.callback(lambda: stop_all(programs, drain_s + STOP_S))
        traced = [] if tracing is None else ["--tracing" if tracing else "--no-tracing"]
        serving = [*traced, "--durability", durability, "--shard-bits", str(shard_bits), "--drain", f"{drain_s}s"]
        serving += ["--label", label] if label else []
        serving += ["--keys", keys_file] if keys_file is not None else []
        cluster = _Cluster([*common, *serving], tiers, secured, listen, metrics, stopper)
        try:
            cluster.start(workers, programs)
        except Unavailable:
            if stopper.asked:
                return
            raise
        collector = None if no_gc else start_gc(common, max_bytes, ttl_s, gc_metrics, programs)
        others = [] if collector is None else [collector]
        served = f"grpc={','.join(cluster.said('grpc'))} etcd={endpoints} metrics={','.join(cluster.said('metrics'))}"
        if dashboard is not None:
            page, url = start_dashboard(common, secured, dashboard, max_bytes, ttl_s, programs, lambda: stopper.asked)
            others.append(page)
            served += f" dashboard={url}"
        print(f"ready {served}", flush=True)
        cluster.watch(server, others)
        log.info("up.stopping")


@dataclass(slots=True)
class _Worker:
    program: Program
    said: dict[str, str]
    short_lives: int = 0
    is_drained: bool = False


class _Cluster:
    """The workers of this host; those that die are started again at their address."""

    def __init__(
        self,
        arguments: list[str],
        tiers: TierSettings,
        secured: ServerAccess,
        listen: str,
        metrics: str,
        stopper: Stopper,
    ) -> None:
        self._arguments = arguments
        self._tiers = tiers
        self._secured = secured
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

    def watch(self, server: EmbeddedEtcd | None, others: Sequence[Program]) -> None:
        """Returns when a signal came. Raises Unavailable where a worker keeps dying, or the bundled etcd does."""
        while not self._stopper.wait(WATCH_S):
            if server is not None and not server.running:
                log.error("up.etcd_ended: starting it again")
                server.start()  # on the same ports, with the same files: workers find it again
            for other in others:
                waited = time.monotonic() - other.started_s > AGAIN_S
                if waited and not other.running:
                    log.error("up.%s_ended exit_code=%s: starting it again", other.name, other.exit_code)
                    other.start()
            for number, worker in enumerate(self._workers):
                if not worker.program.running and not worker.is_drained:
                    self._again(number, worker)

    def _again(self, number: int, worker: _Worker) -> None:
        program = worker.program
        if program.exit_code == 0:
            # It was asked to end (kvstore drain, SIGTERM), and nobody asks for that to get it back.
            worker.is_drained = True
            log.warning("up.worker_drained name=%s: it stays away until kvstore up is started again", program.name)
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
        own = [*tier_arguments(self._tiers, number), *server_arguments(self._secured, number)]
        return kvstore_command("worker", "--listen", listen, "--metrics", metrics, *self._arguments, *own)


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
        yield etcd.endpoints, etcd_arguments(click.get_current_context()), None
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
