"""``kvstore worker``: one worker of a cluster."""

from __future__ import annotations

import faulthandler
import logging
import os
import resource
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore import __version__
from kvstore.cli.access import ClusterAccess, ServerAccess, keys_option
from kvstore.cli.app import Command
from kvstore.cli.options import (
    BULK_PORT,
    DURATION,
    HOST_PORT,
    LISTEN,
    SIZE,
    Logging,
    group,
    option,
    takes,
)
from kvstore.cli.signals import Stopper
from kvstore.core import tracing
from kvstore.core.executor import within
from kvstore.core.write_mode import WRITE_NAMES, Durability, WriteMode
from kvstore.engine.settings import TierSettings
from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from kvstore.engine.coordination import ClusterMember

log = logging.getLogger(__name__)

PEERS_CLOSE_S = 2.0
TRACES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Variables of the OpenTelemetry specification. Each names the address of a collector."""
TRACES_S = 5.0
"""Time to export the last spans."""
ENDING_S = 15.0
"""Time to end, in addition to calls and flushing. Each step has a deadline, and not all steps use all of theirs."""


class FolderSize(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """``FOLDER:SIZE``, such as ``/nvme/kv:200GiB``."""

    name = "folder:size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        folder, colon, size_text = str(value).rpartition(":")
        if not colon or not folder:
            self.fail(f"{value!r} is not a local disk: write FOLDER:SIZE, such as /nvme/kv:200GiB", param, ctx)
        return folder, SIZE.convert(size_text, param, ctx)


@dataclass(frozen=True, slots=True)
class Tiers:
    """The memory and the local disk of a worker."""

    memory: int = option(
        "--memory",
        type=SIZE,
        default=0,
        help="Shared memory of each worker for hot chunks, such as 8GiB; engines on this host map it. By default none.",
    )
    disk: tuple[str, int] | None = option(
        "--disk",
        type=FolderSize(),
        help="Local disk tier, such as /nvme/kv:200GiB, for chunks that memory evicts after more than one use. "
        "Workers must not share the folder; kvstore up creates a subfolder of that size for each of its workers.",
    )
    write: str = option(
        "--write",
        type=click.Choice(WRITE_NAMES),
        default=WriteMode.BEHIND.value,
        show_default=True,
        help="With --memory, when a put is acknowledged: behind, once memory has it (a killed worker loses what "
        "is not on the root yet); through, once the root has it. --durability everysec "
        "and fsync always wait for the root.",
    )
    sync_interval_s: float = option(
        "--sync-interval",
        type=DURATION,
        default="1s",
        show_default=True,
        help="Shortest interval at which a worker reports to its peers what its memory holds.",
    )

    def settings(self) -> TierSettings:
        """The node's settings. Raises InvalidRequest."""
        return TierSettings.of(self.memory, self.disk, self.write, self.sync_interval_s)

    def of_worker(self, number: int) -> Tiers:
        """Returns the tiers of one of several workers on a host, each with its own folder on the local disk."""
        if self.disk is None:
            return self
        folder, size_bytes = self.disk
        return replace(self, disk=(str(Path(folder, f"worker-{number}")), size_bytes))


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of a worker that ``kvstore up`` has too, and gives to each of its workers.

    A new one is declared here and used in ``open_member``, or in ``_serve`` if it is about calls. Nothing else has to
    know it.
    """

    cluster: ClusterAccess = group(ClusterAccess)
    durability: str = option(
        "--durability",
        type=click.Choice([each.value for each in Durability]),
        default="none",
        show_default=True,
        help="What a crash of the host can lose; lost chunks are misses. With none, the last 30 seconds; with "
        "everysec, about the last second; with fsync nothing, because each put is on the device before it returns.",
    )
    tiers: Tiers = group(Tiers)
    shard_bits: int = option(
        "--shard-bits",
        type=click.IntRange(0, 16),
        default=8,
        show_default=True,
        help="A new root gets 2^N folders: 8 suits ten million chunks, 12 a billion. An existing root keeps its own.",
    )
    keys_file: str | None = keys_option()
    compress: bool = option("--compress", is_flag=True, help="Compress new chunks on the root losslessly.")
    secured: ServerAccess = group(ServerAccess)
    logging: Logging = group(Logging)
    tracing: bool | None = option(
        "--tracing/--no-tracing",
        default=None,
        help="Send OpenTelemetry spans, as OTEL_... variables specify; on by default if OTEL_EXPORTER_OTLP_ENDPOINT is "
        "set.",
    )

    def open_member(self) -> ClusterMember:
        """Joins the cluster as a node. Raises InvalidRequest, and what opening the root and etcd raises."""
        from kvstore.codec.codec import KeyFile
        from kvstore.engine.open import open_member

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

    Prints one line when it is ready:

    \b
      ready grpc=HOST:PORT etcd=ENDPOINTS metrics=HOST:PORT

    On SIGTERM or Ctrl-C it refuses new calls, finishes those it accepted, and ends. A second signal
    stops it immediately.

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
    with ExitStack() as undo:
        stopper = undo.enter_context(Stopper())
        _serve(options, at, stopper, drain_s, undo)


def _serve(options: WorkerOptions, at: Addresses, stopper: Stopper, drain_s: float, undo: ExitStack) -> None:
    """Serves until a signal ends it; cleanup is left to ``undo``."""
    from kvstore.meta.workers import Digests
    from kvstore.peers.tier import join_peers
    from kvstore.worker.metrics import start_metrics
    from kvstore.worker.server import Worker

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
        advertise=at.advertise,
        version=__version__,
        bulk_port=at.bulk,
        security=security,
    )
    undo.callback(serving.stop)
    peers = None  # a node without memory reads from no peer
    if member.node.tiers is not None:
        digests = Digests(member.meta, member.keys)
        peers = join_peers(member.node.tiers, digests, member.presence, options.secured.credentials())
    bound = serving.start()
    if peers is not None:
        peers.start(serving.advertised)
    measured = start_metrics(serving, at.metrics, __version__)
    undo.callback(measured.close)
    assert options.cluster.etcd is not None
    print(f"ready grpc={bound} etcd={options.cluster.etcd.endpoints} metrics={measured.address}", flush=True)
    stopper.wait()
    log.info("worker.draining within_s=%g", drain_s)
    # If a step still hangs (a mount, a native library), print its stack and exit before a service manager kills us.
    faulthandler.dump_traceback_later(drain_s + member.node.limits.flush_s + ENDING_S, exit=True)
    if peers is not None:
        peers.close(PEERS_CLOSE_S)  # first: peers must not request what this worker is about to lose
    serving.drain(drain_s)


def _raise_file_limit() -> None:
    """Raises the limit on open files to the system's maximum: connections and the root need some each."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def start_tracing(wanted: bool | None, service: str, instance: str) -> Callable[[], None]:
    """Exports spans from now on, if ``wanted`` or, if that is None, if the environment names a collector.

    Returns a function that ends it, and sends what is left for a few seconds. Raises InvalidRequest if tracing is
    wanted and the ``tracing`` extra is missing.
    """
    if not (any(os.environ.get(name) for name in TRACES) if wanted is None else wanted):
        return lambda: None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as missing:
        raise InvalidRequest(
            f"tracing needs {missing.name}: pip install 'kvstore-llm[tracing]', or give --no-tracing"
        ) from missing
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over these, as OTEL_TRACES_SAMPLER decides what is sampled.
    said = {"service.name": service, "service.version": __version__, "service.instance.id": instance}
    provider = TracerProvider(resource=Resource(said).merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    tracing.enable(provider)
    log.info("tracing.exporting service=%s instance=%s", service, instance)

    def stop() -> None:
        tracing.disable()
        within(TRACES_S, provider.shutdown)

    return stop
