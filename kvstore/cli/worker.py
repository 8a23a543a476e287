"""``kvstore worker``: one worker of a cluster."""

from __future__ import annotations

import faulthandler
import logging
import resource
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from kvstore import __version__
from kvstore.cli.access import ClusterAccess, keys_option
from kvstore.cli.app import Command
from kvstore.cli.options import (
    BULK_PORT,
    DURABILITY,
    DURATION,
    HOST_PORT,
    LISTEN,
    Logging,
    check_ports,
    group,
    option,
    takes,
)
from kvstore.cli.security_options import ServerAccess, Tiers
from kvstore.cli.signals import Stopper
from kvstore.errors import InvalidRequest
from kvstore.writes import Durability

if TYPE_CHECKING:
    from kvstore.node.member import Member

log = logging.getLogger(__name__)

PEERS_CLOSE_S = 2.0
ENDING_S = 15.0
"""Time to end, in addition to calls and flushing. Each step has a deadline, and not all steps use all of theirs."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of a worker that ``kvstore up`` has too, and gives to each of its workers.

    A new one is declared here and used in ``open_member``, or in ``_serve`` if it is about calls. Nothing else has to
    know it.
    """

    cluster: ClusterAccess = group(ClusterAccess)
    durability: str = option("--durability", **DURABILITY)
    tiers: Tiers = group(Tiers)
    shard_bits: int = option(
        "--shard-bits",
        type=click.IntRange(0, 16),
        default=8,
        show_default=True,
        help="A new root gets 2^N folders: 8 suits ten million chunks, 12 a billion. An existing root keeps its own.",
    )
    keys_file: str | None = keys_option()
    compress: bool = option("--compress", is_flag=True, help="Compress new chunks on the root, without loss.")
    label: str = option(
        "--label",
        default="",
        metavar="TEXT",
        help="Name of this roll-out: `kvstore ls --lineage` shows it, `kvstore clear --written-by` deletes by it.",
    )
    secured: ServerAccess = group(ServerAccess)
    logging: Logging = group(Logging)
    tracing: bool | None = option(
        "--tracing/--no-tracing",
        default=None,
        help="Send OpenTelemetry spans, as OTEL_... variables say; by default if OTEL_EXPORTER_OTLP_ENDPOINT is set.",
    )

    def open_member(self) -> Member:
        """Joins the cluster as a node. Raises InvalidRequest, and what opening the root and etcd raises."""
        from kvstore.encodings.codec import KeyFile
        from kvstore.node.opening import open_member

        etcd = self.cluster.etcd
        assert etcd is not None
        return open_member(
            self.cluster.root,
            etcd.endpoints,
            durability=Durability(self.durability),
            etcd_tls=etcd.tls(),
            etcd_user=etcd.who(),
            root_options=self.cluster.root_options.read(),
            shard_bits=self.shard_bits,
            settings=self.tiers.settings(),
            keys=KeyFile(self.keys_file).load() if self.keys_file is not None else None,
            compress=self.compress,
            label=self.label,
        )


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of one worker."""

    listen: str = option(
        "--listen",
        type=LISTEN,
        required=True,
        help="Where to serve gRPC; port 0: any free one. Or unix:PATH.",
    )
    advertise: str | None = option(
        "--advertise",
        type=LISTEN,
        help="Address for clients, if it differs from --listen (0.0.0.0, a container).",
    )
    metrics: str = option(
        "--metrics",
        type=HOST_PORT,
        default="127.0.0.1:0",
        show_default=True,
        help="Where to serve Prometheus metrics (path /metrics).",
    )
    bulk: int | None = option(
        "--bulk",
        type=BULK_PORT,
        default="0",
        show_default=True,
        metavar="PORT|off",
        help="Port of the same host for bulk connections, to open in firewalls; 0: any free one.",
    )

    def listening(self) -> list[tuple[str, str | None]]:
        """Returns each option with the address it listens on."""
        bulk = f"{self.listen.rpartition(':')[0]}:{self.bulk}" if self.bulk and self.listen[:5] != "unix:" else None
        return [("--listen", self.listen), ("--metrics", self.metrics), ("--bulk", bulk)]


@click.command(cls=Command, short_help="Serve a root as one worker of a cluster.")
@takes("options", WorkerOptions)
@takes("at", Addresses)
@click.option(
    "--drain",
    "drain_s",
    type=DURATION,
    default="30s",
    show_default=True,
    help="When stopping, time for calls in progress. Then chunks that only memory has are written to the root, "
    "for at most 10 s (3 s if the root is full); the rest is lost, counted and logged.",
)
def worker(options: WorkerOptions, at: Addresses, drain_s: float) -> None:
    """Serve ROOT over gRPC as one worker of the cluster that --etcd describes.

    Prints one line when it serves:

    \b
      ready grpc=HOST:PORT etcd=ENDPOINTS metrics=HOST:PORT

    On SIGTERM, Ctrl-C or `kvstore drain` it refuses new calls, finishes those it accepted, and ends. A second signal
    stops it at once.

    \b
    Examples:
      kvstore worker --root /mnt/kv --etcd 127.0.0.1:2379 --listen 127.0.0.1:7070
      kvstore worker --root /mnt/kv --etcd 10.0.0.5:2379 --listen 0.0.0.0:7070 --advertise node7:7070 \\
          --tls-cert node7.crt --tls-key node7.key --tls-client-ca ca.crt --access access.json --audit-log audit.log
    """
    if options.cluster.etcd is None:
        raise InvalidRequest(
            "a worker is part of a cluster: give --etcd ENDPOINTS (or KVSTORE_ETCD), or use kvstore up for one host"
        )
    options.logging.configure()
    options.secured.check([at.listen, at.metrics])
    check_ports(at.listening())
    with ExitStack() as undo:
        stopper = undo.enter_context(Stopper())
        _serve(options, at, _Ending(stopper, drain_s), undo)


def _serve(options: WorkerOptions, at: Addresses, ending: _Ending, undo: ExitStack) -> None:
    """Serves until ``ending`` is requested; cleanup is left to ``undo``."""
    from kvstore.cli.tracing import start_tracing
    from kvstore.peers.tier import join_peers
    from kvstore.worker.metrics import start_metrics
    from kvstore.worker.worker import Worker

    _raise_file_limit()
    options.secured.make_private(keeps_keys=options.keys_file is not None)
    security = options.secured.open(at.listen)
    if security.audit is not None:
        undo.callback(security.audit.close)
    undo.callback(start_tracing(options.tracing, "kvstore-worker", at.advertise or at.listen))
    member = options.open_member()
    undo.callback(member.close)
    serving = Worker(
        member,
        at.listen,
        on_drain=ending.ask,
        advertise=at.advertise,
        version=__version__,
        bulk_port=at.bulk,
        security=security,
    )
    undo.callback(serving.stop)
    peers = join_peers(member, options.secured.credentials())
    bound = serving.start()
    if peers is not None:
        peers.start(serving.advertised)
    measured = start_metrics(serving, at.metrics, __version__)
    undo.callback(measured.close)
    assert options.cluster.etcd is not None
    print(f"ready grpc={bound} etcd={options.cluster.etcd.endpoints} metrics={measured.address}", flush=True)
    ending.wait()
    log.info("worker.draining within_s=%g", ending.within_s)
    # If a step still hangs (a mount, a native library): says where, and ends before somebody kills it.
    faulthandler.dump_traceback_later(ending.within_s + member.node.limits.flush_s + ENDING_S, exit=True)
    if peers is not None:
        peers.close(PEERS_CLOSE_S)  # first: nobody may ask for what this worker is about to lose
    serving.drain(ending.within_s)


class _Ending:
    """The end of the worker, requested by a signal or by a client of the control service."""

    def __init__(self, stopper: Stopper, within_s: float) -> None:
        self._stopper = stopper
        self.within_s = within_s

    def wait(self) -> None:
        """Returns when the worker is to end."""
        self._stopper.wait()

    def ask(self, within_s: float | None) -> float:
        """Implements ``kvstore.worker.admin.Drain``. The first call decides how long calls may take."""
        if not self._stopper.asked and within_s is not None:
            self.within_s = within_s
        self._stopper.ask()
        return self.within_s


def _raise_file_limit() -> None:
    """Raises the limit on open files to the system's maximum: connections and the root need some each."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
