"""``kvstore worker``: one worker of a cluster."""

from __future__ import annotations

import faulthandler
import logging
import resource
from contextlib import ExitStack

import click

from kvstore import __version__
from kvstore.cli import logs
from kvstore.cli.access import EtcdAccess
from kvstore.cli.command import Command
from kvstore.cli.kinds import BULK_PORT, DURATION, HOST_PORT, LISTEN
from kvstore.cli.options import (
    durability_option,
    etcd_options,
    keys_option,
    label_option,
    log_format_option,
    log_level_option,
    read_root_options,
    root_options_option,
    shard_bits_option,
    tracing_option,
)
from kvstore.cli.securing import ServerAccess, server_options
from kvstore.cli.signals import Stopper
from kvstore.cli.tiering import tier_options
from kvstore.errors import InvalidRequest
from kvstore.node.settings import TierSettings

log = logging.getLogger(__name__)

PEERS_CLOSE_S = 2.0
ENDING_S = 15.0
"""What ending may take beside its calls and what is flushed: each step has an end, but not all of them their worst."""


@click.command(cls=Command, no_args_is_help=True, short_help="Serve a root as one worker of a cluster.")
@click.option("--root", required=True, metavar="URL", help="The root: a folder, file:///path, s3://bucket/prefix, ...")
@root_options_option
@etcd_options
@click.option(
    "--listen",
    type=LISTEN,
    required=True,
    metavar="HOST:PORT",
    help="Where to serve gRPC; port 0: any free one. Or unix:PATH.",
)
@click.option(
    "--advertise",
    type=LISTEN,
    metavar="HOST:PORT",
    help="How clients reach this worker, where that is not what it listens on (0.0.0.0, a container).",
)
@click.option(
    "--metrics",
    type=HOST_PORT,
    default="127.0.0.1:0",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to serve Prometheus metrics (path /metrics).",
)
@durability_option
@tier_options
@shard_bits_option
@keys_option
@label_option
@click.option(
    "--drain",
    "drain_s",
    type=DURATION,
    default="30s",
    show_default=True,
    help="At the end, how long calls in progress may take to finish. Then what only memory has is written, for at most "
    "10 s; a root that refuses (it is full) is given 3 s, and what it did not take is lost, counted and logged.",
)
@click.option(
    "--bulk",
    type=BULK_PORT,
    default="0",
    show_default=True,
    metavar="PORT|off",
    help="Port of the same host for bulk connections past gRPC, for firewalls to know; 0: any free one.",
)
@server_options
@log_level_option
@log_format_option
@tracing_option
def worker(
    root: str,
    root_options_file: str | None,
    etcd: EtcdAccess | None,
    listen: str,
    advertise: str | None,
    metrics: str,
    durability: str,
    tiers: TierSettings,
    shard_bits: int,
    keys_file: str | None,
    label: str,
    drain_s: float,
    bulk: int | None,
    secured: ServerAccess,
    log_level: str,
    log_format: str,
    tracing: bool | None,
) -> None:
    """Serve ROOT over gRPC as one worker of the cluster that --etcd describes.

    Prints one line when it serves:

    \b
      ready grpc=HOST:PORT etcd=ENDPOINTS metrics=HOST:PORT

    On SIGTERM, Ctrl-C or `kvstore drain` it takes no more calls, finishes those it accepted, and ends. A second signal
    stops at once.

    \b
    Examples:
      kvstore worker --root /mnt/kv --etcd 127.0.0.1:2379 --listen 127.0.0.1:7070
      kvstore worker --root /mnt/kv --etcd 10.0.0.5:2379 --listen 0.0.0.0:7070 --advertise node7:7070 \\
          --tls-cert node7.crt --tls-key node7.key --tls-client-ca ca.crt --access access.json --audit-log audit.log
    """
    if etcd is None:
        raise InvalidRequest(
            "a worker is part of a cluster: give --etcd ENDPOINTS, or use kvstore up for one host alone"
        )
    logs.configure(log_level, log_format)
    secured.check([listen, metrics])
    with ExitStack() as undo:
        stopper = undo.enter_context(Stopper())
        from kvstore.cli.tracing import start_tracing
        from kvstore.encodings.keys import KeyFile
        from kvstore.node.opening import open_member
        from kvstore.peers.joining import join_peers
        from kvstore.worker.metrics import start_metrics
        from kvstore.worker.worker import Worker

        _raise_file_limit()
        secured.make_private(keeps_keys=keys_file is not None)
        security = secured.open()
        if security.audit is not None:
            undo.callback(security.audit.close)
        undo.callback(start_tracing(tracing, "kvstore-worker", advertise or listen))
        member = open_member(
            root,
            etcd.endpoints,
            durable=durability == "fsync",
            etcd_tls=etcd.tls(),
            etcd_user=etcd.who(),
            root_options=read_root_options(root_options_file),
            shard_bits=shard_bits,
            settings=tiers,
            keys=KeyFile(keys_file).load() if keys_file is not None else None,
            label=label,
        )
        undo.callback(member.close)
        ending = _Ending(stopper, drain_s)
        serving = Worker(
            member,
            listen,
            on_drain=ending.ask,
            advertise=advertise,
            version=__version__,
            bulk=bulk is not None,
            bulk_port=bulk or 0,
            security=security,
        )
        undo.callback(serving.stop)
        peers = join_peers(member, secured.credentials())
        bound = serving.start()
        if peers is not None:
            peers.start(serving.advertised)
        measured = start_metrics(serving, metrics, __version__)
        undo.callback(measured.close)
        print(f"ready grpc={bound} etcd={etcd.endpoints} metrics={measured.address}", flush=True)
        stopper.wait()
        log.info("worker.draining within_s=%g", ending.within_s)
        # Where a step hangs all the same (a mount, a native library): says where, and ends before somebody kills it.
        faulthandler.dump_traceback_later(ending.within_s + member.node.limits.flush_s + ENDING_S, exit=True)
        if peers is not None:
            peers.close(PEERS_CLOSE_S)  # first of all: nobody asks for what this worker is about to lose
        serving.drain(ending.within_s)


class _Ending:
    """How the worker ends: when a signal comes, or a client of the control service asks for it."""

    def __init__(self, stopper: Stopper, within_s: float) -> None:
        self._stopper = stopper
        self.within_s = within_s

    def ask(self, within_s: float | None) -> float:
        """See ``kvstore.worker.control.service.Drain``. The first who asks says how long calls may take."""
        if not self._stopper.asked and within_s is not None:
            self.within_s = within_s
        self._stopper.ask()
        return self.within_s


def _raise_file_limit() -> None:
    """As many open files as the system allows: each connection takes one, and the root needs some too."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
