"""The cost of garbage collection in a large cluster: measured per operation, then simulated over a whole round.

Hypothesis: with 1,000 nodes, 1e9 chunks and 65,536 shards a round of six hours stays far below what a small etcd bears,
and bytes out of etcd, not writes into it, are what grows first.  Sizes and times of single operations are measured
here, on the real code, a real etcd and a real folder; only their number and their moments are simulated, from a seed:
each node takes holds and announces as a real one does, each sweep waits for the last of them.

    python -m benchmarks.scale [--nodes 1000] [--chunks 1e9] [--shards 65536] [--round-h 6] [--exact] [--json]
        [--capacity 1e15] [--fill 1e11]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from kvstore.address import Address
from kvstore.format import places
from kvstore.format.header import FIXED_BYTES, Incarnation
from kvstore.meta.embedded_etcd import EmbeddedEtcd
from kvstore.meta.etcd import EtcdMeta
from kvstore.meta.keys import Keys, SweepId
from kvstore.meta.memory import MemoryMeta
from kvstore.meta.session import Session
from kvstore.meta.store import Put
from kvstore.meta.sweeps import VICTIMS_MAX, Condemned, Seq
from kvstore.meta.usage import Capacity
from kvstore.namespace import NamespaceId
from kvstore.node.usage import REPORT_SHARE
from kvstore.root.identity import RootId, RootIdentity, create_or_open
from kvstore.root.memory import MemoryRoot
from kvstore.root.posix import PosixRoot
from kvstore.sources import RandomIds, SystemClock
from kvstore_gc.capacity import PUBLISH_S_PER_NODE, Accounts
from kvstore_gc.deletion import Condemnation, Taken, Trash
from kvstore_gc.grace import Spared
from kvstore_gc.ledger import ANNOUNCEMENTS_PER_S, GROUP_MAX, InFlight, Ledger
from kvstore_gc.site import Site, Timings

EVENT_OVERHEAD_BYTES = 60
"""Revisions, lease and framing around a key and its value in a watch response."""


FS_OPERATIONS_PER_VICTIM = 10
"""Two looks (open, stat, read, close), a rename, an unlink."""


@dataclass(frozen=True)
class Cluster:
    """The cluster that is simulated."""

    nodes: int
    chunks: int
    shards: int
    round_s: float
    victims_share: float
    announce_s: float
    keepalive_s: float
    hold_s: float
    """Mean of an exponential distribution: from the match to the end of the load."""
    capacity_bytes: int
    fill_bytes_per_s: float
    """Bytes per second that all nodes together write."""
    is_exact: bool
    """True if nodes are told addresses instead of a filter."""


@dataclass(frozen=True)
class Costs:
    """Measured: sizes in bytes, times in seconds."""

    condemned_bytes: int
    seq_bytes: int
    condemn_txn_s: float
    announce_txn_s: float
    keepalive_s: float
    list_entry_s: float
    look_s: float
    reap_s: float


@dataclass(frozen=True)
class Load:
    """The load, per second of the round."""

    etcd_writes_per_s: float
    etcd_keepalives_per_s: float
    etcd_in_bytes_per_s: float
    etcd_out_bytes_per_s: float
    usage_reports_per_s: float
    room_out_bytes_per_s: float
    """To all nodes."""
    listings_per_s: float
    fs_operations_per_s: float
    sweeps_in_flight: float
    sweep_p50_s: float
    sweep_p99_s: float
    etcd_busy_share: float
    """The share of one core's time, if all transactions were made one after the other as measured here."""
    collectors: float
    """Processes of one thread that the listing and reaping of a round would keep busy."""


def main() -> int:
    """Measures, simulates, prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.split("\n\n")[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--chunks", type=float, default=1e9)
    parser.add_argument("--shards", type=int, default=65_536)
    parser.add_argument("--round-h", type=float, default=6.0)
    parser.add_argument("--victims", type=float, default=0.1, help="share of the chunks that a round takes")
    parser.add_argument("--capacity", type=float, default=1e15, help="bytes")
    parser.add_argument("--fill", type=float, default=1e11, help="bytes that all nodes together write in a second")
    parser.add_argument("--hold-s", type=float, default=2.0, help="mean life of a hold")
    parser.add_argument("--exact", action="store_true", help="tell nodes exact addresses instead of a filter")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cluster = Cluster(
        arguments.nodes,
        int(arguments.chunks),
        arguments.shards,
        arguments.round_h * 3600,
        arguments.victims,
        arguments.nodes / ANNOUNCEMENTS_PER_S,
        5.0,
        arguments.hold_s,
        int(arguments.capacity),
        arguments.fill,
        arguments.exact,
    )
    victims = round(cluster.chunks * cluster.victims_share / cluster.shards)
    if victims > VICTIMS_MAX:
        parser.error(f"{victims} victims in one shard are over {VICTIMS_MAX}: more shards, or more rounds")
    costs = measured(victims, cluster.is_exact)
    load = simulated(cluster, costs, random.Random(arguments.seed))
    if arguments.json:
        print(json.dumps({"cluster": asdict(cluster), "costs": asdict(costs), "load": asdict(load)}, indent=1))
    else:
        show(cluster, costs, load)
    return 0


def measured(victims_count: int, is_exact: bool) -> Costs:
    """Single operations, each the median of some."""
    ids, clock = RandomIds(), SystemClock()
    addresses = [Address(os.urandom(16)) for _ in range(victims_count)]
    if is_exact:
        record = Condemned(SweepId(ids.fresh()), ids.fresh(), victims_count, False, b"".join(addresses))
    else:
        record = Condemned.of_victims(SweepId(ids.fresh()), ids.fresh(), addresses)
    seq = Seq(ids.fresh(), ids.fresh()).to_json()
    with tempfile.TemporaryDirectory() as folder, EmbeddedEtcd(Path(folder) / "etcd") as server:
        meta, keys = EtcdMeta(server.endpoints), Keys(ids.fresh())
        identity = RootIdentity(RootId(keys.root_id), 0, 0)
        ledger = Ledger(Site(MemoryRoot(), identity, meta, timings=Timings(meta_timeout_s=10.0)))
        condemn_s, shard = [], 0
        for _ in range(8):
            records = {shard + at: record for at in range(GROUP_MAX)}
            began_s = time.perf_counter()
            sweeps = ledger.condemn(records)
            condemn_s.append(time.perf_counter() - began_s)
            ledger.close(sweeps)
            shard += GROUP_MAX
        session = Session.open(meta, keys, clock=clock, ids=ids, ttl_s=60)
        revisions = iter(range(1, 10_000))
        announce_s = _median(lambda: session.txn(announced=next(revisions)), 100)
        keepalive_s = _median(session.beat, 100)
        meta.put(keys.gc_seq, seq)
        meta.txn((), (Put(keys.condemned_in(0), record.to_bytes()),))
        meta.close()
        list_s, look_s, reap_s = _on_files(Path(folder) / "root")
    return Costs(
        len(record.to_bytes()) + len(keys.condemned_in(0)) + EVENT_OVERHEAD_BYTES,
        len(seq) + len(keys.gc_seq) + EVENT_OVERHEAD_BYTES,
        statistics.median(condemn_s),
        announce_s,
        keepalive_s,
        list_s,
        look_s,
        reap_s,
    )


def _on_files(folder: Path) -> tuple[float, float, float]:
    """Seconds to list one chunk, to look at one, to take one."""
    count, ids = 4_000, RandomIds()
    folder.mkdir()
    root = PosixRoot(folder)
    identity = create_or_open(root, ids, shard_bits=0)
    victims = []
    for number in range(count):
        victim = Condemnation(Address(os.urandom(16)), NamespaceId(b"n" * 8), Incarnation(os.urandom(16)), FIXED_BYTES)
        content = bytearray(FIXED_BYTES)
        content[104:120] = victim.incarnation
        staged = places.staged(b"s" * 16, number)
        root.stage(staged, [memoryview(content)], stamp_ns=1, durable=False)
        root.publish(staged, victim.name(0), durable=False)
        victims.append(victim)
    began_s = time.perf_counter()
    assert sum(1 for _ in root.list(places.shard_folder(0))) == count
    list_s = (time.perf_counter() - began_s) / count
    began_s = time.perf_counter()
    for victim in victims:
        root.look(victim.name(0), FIXED_BYTES)
    look_s = (time.perf_counter() - began_s) / count
    trash, taken, sweep = Trash(Site(root, identity, MemoryMeta())), Taken(), SweepId(ids.fresh())
    trash.open(sweep)
    began_s = time.perf_counter()
    in_flight = InFlight(0, 1, 1, Condemned.of_victims(sweep, bytes(16), []))
    assert trash.reap(in_flight, victims, Spared.of([]), taken)
    reap_s = (time.perf_counter() - began_s) / count
    assert len(taken.reaped) == count
    return list_s, look_s, reap_s


def simulated(cluster: Cluster, costs: Costs, source: random.Random) -> Load:
    """One round: sweeps begin evenly, each ends when the last node has announced it."""
    groups = -(-cluster.shards // GROUP_MAX)
    between_s = cluster.round_s / groups
    # Each node announces at most every ``announce_s``, on its own beat, up to the birth of its oldest hold.
    beats_s = [source.random() * cluster.announce_s for _ in range(cluster.nodes)]
    announcements, latencies = 0, []
    announced_s = [0.0] * cluster.nodes
    for group in range(groups):
        condemned_s = group * between_s
        last_s = condemned_s
        for node in range(cluster.nodes):
            # The oldest hold alive at the condemnation has, memoryless, one more mean life to go; the oldest of the
            # few that a node has alive at once ends last.
            free_s = condemned_s + max(source.expovariate(1 / cluster.hold_s) for _ in range(4))
            due_s = beats_s[node] + -(-(free_s - beats_s[node]) // cluster.announce_s) * cluster.announce_s
            if announced_s[node] != due_s:
                announced_s[node] = due_s
                announcements += 1
            last_s = max(last_s, due_s)
        victims = cluster.chunks * cluster.victims_share / groups
        latencies.append(last_s - condemned_s + victims * costs.reap_s / 8 + 2 * costs.condemn_txn_s)
    events = groups * (GROUP_MAX * costs.condemned_bytes + costs.seq_bytes)
    closes = groups * (GROUP_MAX * 120 + costs.seq_bytes)
    victims = cluster.chunks * cluster.victims_share
    # A txn counts as what it writes: condemn and close each one raft entry; so does an announcement.
    writes = 2 * groups + announcements
    busy_s = 2 * groups * costs.condemn_txn_s + announcements * costs.announce_txn_s
    reports_per_s, room_bytes_per_s = reported(cluster)
    fs_s = cluster.chunks * costs.list_entry_s + victims * (costs.look_s + costs.reap_s)
    return Load(
        writes / cluster.round_s,
        cluster.nodes / cluster.keepalive_s,
        (events + announcements * 200) / cluster.round_s,
        (events + closes) * cluster.nodes / cluster.round_s,
        reports_per_s,
        room_bytes_per_s,
        cluster.chunks / cluster.round_s,
        (cluster.chunks + victims * FS_OPERATIONS_PER_VICTIM) / cluster.round_s,
        statistics.mean(latencies) / between_s * GROUP_MAX,
        statistics.median(latencies),
        statistics.quantiles(latencies, n=100)[98],
        busy_s / cluster.round_s,
        fs_s / cluster.round_s,
    )


def reported(cluster: Cluster) -> tuple[float, float]:
    """Reports of nodes in a second, and bytes of collectors' records to all of them, while the root fills."""
    accounts = Accounts(cluster.capacity_bytes)
    accounts.begin_listing()
    accounts.end_listing(0)
    level = accounts.level
    assert level is not None
    credit_bytes = level.spare_bytes // cluster.nodes
    pace_s = cluster.nodes / ANNOUNCEMENTS_PER_S / 2
    reports_per_s = min(cluster.fill_bytes_per_s / (REPORT_SHARE * credit_bytes), cluster.nodes / pace_s)
    records_per_s = min(reports_per_s, 1 / (PUBLISH_S_PER_NODE * cluster.nodes))
    record = Capacity(1 << 40, level.used_bytes, level.capacity_bytes, credit_bytes, False, level.headroom_bytes)
    size_bytes = len(record.to_json()) + len(Keys(bytes(16)).gc_capacity) + EVENT_OVERHEAD_BYTES
    return reports_per_s, records_per_s * size_bytes * cluster.nodes


def show(cluster: Cluster, costs: Costs, load: Load) -> None:
    """The table."""
    kind = "exact addresses" if cluster.is_exact else "filters"
    print(f"{cluster.nodes:,} nodes, {cluster.chunks:,} chunks in {cluster.shards:,} shards,")
    print(f"{cluster.victims_share:.0%} taken in a round of {cluster.round_s / 3600:g} h, nodes told by {kind}\n")
    print("measured here, per operation")
    for name, value in asdict(costs).items():
        print(f"  {name:24} {value:>12,} B" if name.endswith("bytes") else f"  {name:24} {value * 1e6:>12,.1f} us")
    print("\nsimulated, over the round")
    for name, value in asdict(load).items():
        print(f"  {name:24} {value:>16,.2f}")


def _median(work: Callable[[], object], count: int) -> float:
    spent = []
    for _ in range(count):
        began_s = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began_s)
    return statistics.median(spent)


if __name__ == "__main__":
    sys.exit(main())
