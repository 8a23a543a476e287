"""``kvstore-gc``: the command. Shares options, kinds and output with the commands of ``kvstore``."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass, replace
from typing import Any

import click

from kvstore.cli import options as logs
from kvstore.cli.access import ClusterAccess
from kvstore.cli.app import Command, check_failed
from kvstore.cli.options import DURATION, HOST_PORT, LOG_FORMAT, SIZE, StorageLimits, flag, group, option, split, takes
from kvstore.cli.output import print_table, progress_bar
from kvstore.cli.signals import Stopper
from kvstore.core.validate import size
from kvstore.core.write_mode import BOUND_BYTES_MIN
from kvstore.errors import InvalidRequest
from kvstore.security.tls import is_loopback
from kvstore.version import VERSION
from kvstore_gc.collector import Collector, opened
from kvstore_gc.config import Config, read_config
from kvstore_gc.summary import Summary

log = logging.getLogger(__name__)

INTERVAL_S_MIN = 1.0


@dataclass(frozen=True, slots=True)
class CollectorLimits:
    """The limits of a collector: options win over the policy file."""

    room: StorageLimits = group(StorageLimits)
    policy: str | None = option(
        "--policy", metavar="FILE", help="TOML file with all of these, and quotas; options win over it."
    )

    def config(self) -> Config:
        """Returns the policy file's configuration, overridden by options. Raises InvalidRequest for nonsense."""
        config = Config()
        if self.policy is not None:
            config = read_config(self.policy, DURATION, SIZE)
        given: dict[str, Any] = {
            "ttl_s": self.room.ttl_s,
            "max_bytes": self.room.max_bytes,
        }
        config = replace(config, **{name: value for name, value in given.items() if value is not None})
        config.goals(())  # checked before anything is opened
        if config.max_bytes is not None:
            _check_unit("max_bytes", config.max_bytes)
        for share in config.shares:
            if share.max_bytes:  # 0: nothing of theirs is to stay
                _check_unit(f"max_bytes of {share.label}", share.max_bytes)
        return config


def _check_unit(what: str, size_bytes: int) -> None:
    if size_bytes < BOUND_BYTES_MIN:
        raise InvalidRequest(f"{what} is {size(size_bytes)}, under 1MiB: give a unit, such as 200GiB")


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of a collector, and their output."""

    once: bool = flag("--once", help="One round over all shards, then end.")
    interval_s: float | None = option(
        "--interval", type=DURATION, help="A round every TIME, sooner if the root fills up."
    )
    dry_run: bool = flag("--dry-run", help="Print what would be deleted and why; change nothing.")
    as_json: bool = flag("--json", help="Print one JSON object per round, each on a line.")
    metrics: str | None = option(
        "--metrics",
        type=HOST_PORT,
        help="With --interval: serve Prometheus metrics at this address; port 0: any free one, printed as "
        "ready metrics=HOST:PORT.",
    )
    log_level: str | None = option(
        "--log-level", type=click.Choice(logs.LEVELS), help="By default info with --interval, else warning."
    )
    log_format: str = option("--log-format", **LOG_FORMAT)

    def check(self) -> None:
        """Raises InvalidRequest for invalid combinations of options."""
        interval_s = self.interval_s
        if (self.once or self.dry_run) == (interval_s is not None):
            raise InvalidRequest("give --once (or --dry-run) for one round, or --interval TIME for one after another")
        if interval_s is not None and interval_s < INTERVAL_S_MIN:
            raise InvalidRequest(f"--interval is {interval_s:g} s: expected {INTERVAL_S_MIN:g} s or more")
        if self.metrics is not None and interval_s is None:
            raise InvalidRequest("--metrics is for --interval: a single round prints what it did (--json)")

    def configure(self) -> None:
        """Sets up the log."""
        level = self.log_level or ("warning" if self.interval_s is None else "info")
        logs.configure(level, self.log_format)
        logging.getLogger("kvstore_gc").setLevel(level.upper())
        if self.metrics is not None and not is_loopback(self.metrics):
            log.warning("gc.open_network %s: any client that can connect can read the metrics", self.metrics)


@click.command(
    cls=Command,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(VERSION, "--version", "-v", prog_name="kvstore-gc")
@takes("cluster", ClusterAccess)
@takes("limits", CollectorLimits)
@takes("rounds", Rounds)
def command(cluster: ClusterAccess, limits: CollectorLimits, rounds: Rounds) -> None:
    """Delete the least useful chunks of a root while nodes use it.

    A chunk is deleted when its time to live is over. With --interval the least useful chunks are deleted all the time,
    so that a twentieth of the capacity, or more while nodes write fast, stays free. Chunks that are held by a request
    or pinned stay. Of several collectors on one root one works, and the others stand by: give each the same limits.

    On SIGTERM or Ctrl-C it ends immediately; the next round of any collector finishes what it had begun.

    Exit codes: 0 done, 1 it could not finish (a node did not answer in time, or everything left is pinned), 2 wrong use
    or could not run.

    \b
    A policy file:
      ttl = "7d"                  # nothing stays unused for longer
      max_bytes = "2TiB"
      order = "uses"              # what goes first; or "lru"
      [[quota]]
      tenant = "acme"             # all namespaces of a tenant together
      max_bytes = "200GiB"
      [[quota]]
      namespace = "llama-3.1-8b"  # of any tenant unless one is named
      max_bytes = "50GiB"

    \b
    Examples:
      kvstore-gc --root /mnt/kv --etcd 10.0.0.5:2379 --interval 60s --max-bytes 2TiB --ttl 7d
      kvstore-gc --root /mnt/kv --etcd 10.0.0.5:2379 --dry-run --ttl 1d
      kvstore-gc --root /mnt/kv --etcd 10.0.0.5:2379 --once --json
    """
    rounds.check()
    config = limits.config()
    rounds.configure()
    tell = _print_json if rounds.as_json else _print
    if cluster.etcd is None:
        collect_host(cluster, config, rounds)
        return
    etcd = cluster.etcd.open()
    with Stopper() as stopper, opened(cluster.root, cluster.root_options.read(), etcd) as on:
        collector = Collector(on, config, stopper.wait)
        if rounds.interval_s is not None:
            metrics = split(rounds.metrics) if rounds.metrics else None
            done, ready = (_print_json, _quiet) if rounds.as_json else (_quiet, _print_ready)
            collector.serve(rounds.interval_s, metrics, ready, done)
            return
        with progress_bar("listing shards", on.shards_count) as moved:
            summary = collector.once(lambda shard: moved(1), dry_run=rounds.dry_run)
    if summary is None:
        return
    tell(summary)
    if summary.unfinished:
        check_failed()


def collect_host(cluster: ClusterAccess, config: Config, rounds: Rounds) -> None:
    """Collects a folder that the processes of this host share."""
    from kvstore_gc import host

    if rounds.metrics is not None or rounds.dry_run:
        raise InvalidRequest(
            "--metrics and --dry-run need the etcd of a cluster: give --etcd ENDPOINTS, or leave them out"
        )
    with Stopper() as stopper, host.opened(cluster.root, config, cluster.root_options.read()) as collector:
        if rounds.interval_s is not None:
            collector.serve(stopper.wait)
            return
        with progress_bar("listing shards", collector.shards_count) as moved:
            done = collector.once(lambda: moved(1))
    spared = {"held": len(done.held), "pinned": done.pinned_count, "used since": done.used_count}
    found = {"deleted": done.count, "bytes": done.size_bytes, "lacking_bytes": done.lacking_bytes}
    found |= {**spared, "failed": done.failed_count}
    said = f"deleted {done.count} chunks, {size(done.size_bytes)}"
    said += "".join(f"\nspared: {count} chunks, {why}" for why, count in spared.items() if count)
    print(json.dumps(found) if rounds.as_json else said, flush=True)
    if done.failed_count or done.lacking_bytes:
        check_failed()


def _quiet(_: object) -> None:
    pass


def _print_ready(metrics: str) -> None:
    print(f"ready metrics={metrics}", flush=True)


def _print_json(summary: Summary) -> None:
    print(json.dumps(summary.to_json(), ensure_ascii=False), flush=True)


def _print(summary: Summary) -> None:
    used = f"{summary.scanned.count} chunks, {size(summary.used_before_bytes)}"
    if summary.capacity_bytes:
        share = 100 * summary.used_before_bytes / summary.capacity_bytes
        used += f", {share:.1f} % of {size(summary.capacity_bytes)}"
    print(used)
    rows = [
        (each.name or each.id, each.tenant or "", each.scanned.count, reason, tally.count, size(tally.bytes))
        for each in summary.namespaces.values()
        for reason, tally in each.chosen.items()
    ]
    if rows:
        print_table(("NAMESPACE", "TENANT", "CHUNKS", "REASON", "CHOSEN", "SIZE"), rows)
    for why, tally in summary.kept.items():
        print(f"kept: {tally.count} chunks, {size(tally.bytes)}, {why}")
    for why, count in summary.spared.items():
        if count:
            print(f"spared: {count} chunks, {why}")
    if summary.dry_run:
        freed = summary.used_before_bytes - summary.used_after_bytes
        print(f"would delete {sum(tally.count for tally in summary.chosen.values())} chunks, {size(freed)}")
        return
    took_s = sum(summary.seconds.values())
    print(f"deleted {summary.reaped.count} chunks, {size(summary.reaped.bytes)}, in {took_s:.1f} s")
    for kind, count in summary.orphans.items():
        if count:
            print(f"leftovers: {count} {kind}")
    for what in summary.unfinished:
        print(f"unfinished: {what}", file=sys.stderr)
