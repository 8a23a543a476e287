"""``kvstore-gc``: the command. Shares options, kinds and output with the commands of ``kvstore``."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace

import click
from prometheus_client import disable_created_metrics

from kvstore.address import Address
from kvstore.cli import logs
from kvstore.cli.access import EtcdAccess
from kvstore.cli.command import CHECK_FAILED, Command
from kvstore.cli.kinds import DURATION, HOST_PORT, SIZE, is_loopback, split
from kvstore.cli.options import etcd_options, log_format_option, read_root_options, root_options_option
from kvstore.cli.output import print_table, progress_bar, size
from kvstore.cli.signals import Stopper
from kvstore.errors import InvalidRequest
from kvstore.meta.keys import parse_id
from kvstore_gc.config import Config, read_config
from kvstore_gc.serving import Collector, opened
from kvstore_gc.summary import Summary

log = logging.getLogger(__name__)

INTERVAL_S_MIN = 1.0


@click.command(
    cls=Command,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option("--root", required=True, metavar="URL", help="The root: a folder, file:///path, s3://bucket/prefix, ...")
@root_options_option
@etcd_options
@click.option("--once", is_flag=True, help="One round over all shards, then end.")
@click.option(
    "--interval", "interval_s", type=DURATION, metavar="TIME", help="A round every TIME, at once when it is full."
)
@click.option("--dry-run", is_flag=True, help="Say what would be deleted and why; change nothing at all.")
@click.option("--ttl", "ttl_s", type=DURATION, metavar="TIME", help="Delete what nobody used for so long.")
@click.option("--max-bytes", type=SIZE, metavar="SIZE", help="What chunks may take; by default all there is room for.")
@click.option("--high", type=float, help="Delete when more than this share of it is used.  [default: 0.9]")
@click.option("--low", type=float, help="... until no more than this share is used.  [default: 0.8]")
@click.option("--policy", metavar="FILE", help="TOML file with all of these, and quotas; options win over it.")
@click.option(
    "--examples", type=click.IntRange(0, 10_000), default=10, show_default=True, metavar="N",
    help="With --dry-run: name that many chunks, the longest unused first.",
)  # fmt: skip
@click.option(
    "--explain", "addresses", multiple=True, metavar="ADDRESS", help="With --dry-run: say why a chunk stays or goes."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each round, on a line.")
@click.option("--metrics", type=HOST_PORT, metavar="HOST:PORT", help="With --interval: serve Prometheus metrics there.")
@click.option(
    "--nice", "niceness", type=click.IntRange(0, 19), default=10, show_default=True, metavar="N",
    help="Give way to other programs of this host, as nice(1) does; 0: none.",
)  # fmt: skip
@click.option(
    "--metrics-file", metavar="FILE",
    help="With --once: write Prometheus metrics there, for the node exporter's textfile collector.",
)  # fmt: skip
@click.option("--log-level", type=click.Choice(logs.LEVELS), help="By default info with --interval, else warning.")
@log_format_option
def command(
    root: str,
    root_options_file: str | None,
    etcd: EtcdAccess | None,
    once: bool,
    interval_s: float | None,
    dry_run: bool,
    ttl_s: float | None,
    max_bytes: int | None,
    high: float | None,
    low: float | None,
    policy: str | None,
    examples: int,
    addresses: tuple[str, ...],
    as_json: bool,
    metrics: str | None,
    niceness: int,
    metrics_file: str | None,
    log_level: str | None,
    log_format: str,
) -> None:
    """Delete chunks of a root that are worth the least, beside nodes that go on working.

    A chunk goes when its time to live is over, and the least useful ones go when more than --high of the room is
    used. Nothing that a request holds or that is pinned is taken. Several collectors on one root share the work;
    give all of them the same limits. The smallest --max-bytes holds for all.

    On SIGTERM or Ctrl-C it leaves at once; what it leaves open the next round of any collector finishes.

    Exit codes: 0 done, 1 it could not finish what it had to (a node did not answer in time, all that is left is
    pinned), 2 wrong use or could not run.

    \b
    A policy file:
      ttl = "7d"                  # nothing stays unused for longer
      max_bytes = "2TiB"          # also high = 0.9, low = 0.8
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
    if etcd is None:
        raise InvalidRequest("give --etcd ENDPOINTS: it knows who is using what")
    _check_mode(once or dry_run, interval_s, metrics)
    if metrics_file is not None and not once:
        raise InvalidRequest("--metrics-file is for --once: with --interval metrics are served (--metrics)")
    if addresses and not dry_run:
        raise InvalidRequest("--explain says what a round would do: give --dry-run as well")
    explain = [_address(text) for text in addresses]
    config = _config(policy, ttl_s, max_bytes, high, low)
    level = log_level or ("warning" if interval_s is None else "info")
    logs.configure(level, log_format)
    # They would be a series beside each counter, of which nobody asks anything.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    logging.getLogger("kvstore_gc").setLevel(level.upper())
    os.nice(niceness)
    with Stopper() as stopper, opened(root, read_root_options(root_options_file), etcd.open()) as on:
        collector = Collector(on, config, stopper.wait)
        if interval_s is not None:
            told: Callable[[Summary], object] = _print_json if as_json else lambda summary: None
            collector.serve(interval_s, split(metrics) if metrics else None, told)
            return
        with progress_bar("listing shards", 1 << on.identity.shard_bits) as moved:
            if dry_run:
                summary = collector.dry_run(lambda shard: moved(1), examples, explain)
            else:
                summary = collector.once(lambda shard: moved(1), metrics_file)
    if summary is None:
        return
    (_print_json if as_json else _print)(summary)
    if summary.unfinished:
        click.get_current_context().exit(CHECK_FAILED)


def _check_mode(single: bool, interval_s: float | None, metrics: str | None) -> None:
    if single == (interval_s is not None):
        raise InvalidRequest("give --once (or --dry-run) for one round, or --interval TIME for one after another")
    if interval_s is not None and interval_s < INTERVAL_S_MIN:
        raise InvalidRequest(f"--interval is {interval_s:g} s: expected {INTERVAL_S_MIN:g} s or more")
    if metrics is not None and interval_s is None:
        raise InvalidRequest("--metrics is for --interval: a single round prints what it did (--json)")
    if metrics is not None and not is_loopback(metrics):
        log.warning("gc.open_network %s: anybody who reaches it can read the metrics", metrics)


def _address(text: str) -> Address:
    found = parse_id(text)
    if found is None:
        raise InvalidRequest(f"--explain {text!r}: expected the 32 hexadecimal digits of an address")
    return Address(found)


def _config(
    policy: str | None, ttl_s: float | None, max_bytes: int | None, high: float | None, low: float | None
) -> Config:
    """The policy file, with what the options say instead. Raises InvalidRequest where it makes no sense."""
    config = Config()
    if policy is not None:
        config = read_config(
            policy, lambda text: DURATION.convert(text, None, None), lambda text: SIZE.convert(text, None, None)
        )
    config = replace(
        config,
        ttl_s=config.ttl_s if ttl_s is None else ttl_s,
        max_bytes=config.max_bytes if max_bytes is None else max_bytes,
        high=config.high if high is None else high,
        low=config.low if low is None else low,
    )
    config.goals((), config.max_bytes)  # checked before anything is opened
    return config


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
        _print_dry_run(summary)
        return
    took_s = sum(summary.seconds.values())
    print(f"deleted {summary.reaped.count} chunks, {size(summary.reaped.bytes)}, in {took_s:.1f} s")
    for kind, count in summary.orphans.items():
        if count:
            print(f"leftovers: {count} {kind}")
    for what in summary.unfinished:
        print(f"unfinished: {what}", file=sys.stderr)


def _print_dry_run(summary: Summary) -> None:
    freed = summary.used_before_bytes - summary.used_after_bytes
    print(f"would delete {sum(tally.count for tally in summary.chosen.values())} chunks, {size(freed)}")
    examples = [
        (each.address, each.namespace, each.reason, size(each.size_bytes), _ago(each.idle_s))
        for each in summary.examples
    ]
    if examples:
        print_table(("ADDRESS", "NAMESPACE", "REASON", "SIZE", "UNUSED FOR"), examples)
    for each in summary.explained:
        cutoff = "nothing goes for room" if each.cutoff_s is None else f"what is over {_ago(each.cutoff_s)} goes"
        print(
            f"{each.address}: {'goes' if each.goes else 'stays'}, {each.reason}; unused for {_ago(each.idle_s)}, "
            f"which its uses and hints make {_ago(each.weighted_s)}; {cutoff}"
        )


def _ago(seconds: float) -> str:
    for unit, scale in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.0f}{unit}"
    return f"{seconds:.0f}s"
