"""The rules of the protocol, one by one, on real nodes and collectors: the harm that each prevents."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from kvstore.core.clock import RandomIds, SystemClock
from kvstore.errors import InvalidRequest, SessionLost
from kvstore.format import places
from kvstore.format.header import FIXED_BYTES
from kvstore.format.places import Name
from kvstore.meta.keys import Keys, SessionId, part_of
from kvstore.meta.memory import MemoryMetadata
from kvstore.meta.session import Session
from kvstore.meta.store import LeaseId
from kvstore.root.interface import Seen
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore_gc.execute import SweepReport
from tests.kit import faulty_meta as meta_faulty
from tests.kit.abandoned import leave_in_flight, republish
from tests.kit.clusters import NOT_LINGERING, TIMINGS, Cluster, cluster, eventually, looking, prompt, put
from tests.kit.fake_meta import FakeClock
from tests.kit.faulty_meta import FaultyMeta
from tests.kit.faulty_root import FaultyRoot
from tests.kit.object_root import MemoryObjectRoot
from tests.kit.patience import PATIENCE_S
from tests.kit.sweeping import WholeSweeper


@pytest.fixture
def c() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


def test_a_sweep_takes_what_nobody_holds_and_leaves_nothing(c: Cluster) -> None:
    node, chain = c.node(), prompt(1, 8)
    assert put(node, chain) == 8
    report = c.collector().sweep(c.plans(chain))
    assert report.reaped.count == report.condemned.count == 8
    assert c.present(chain) == 0 and node.node.match(chain) == 0
    assert c.leftovers() == []


def test_a2_a_held_chunk_is_spared_and_holds_no_sweep_up(c: Cluster) -> None:
    node, kept, other = c.node(limits=NOT_LINGERING), prompt(1, 8), prompt(2, 8)
    put(node, kept)
    put(node, other)
    hold = node.node.hold(kept)
    report = c.collector().sweep(c.plans(kept, other))
    assert (report.reaped.count, report.spared["held"]) == (8, 8)
    assert (c.present(kept), c.present(other), c.leftovers()) == (8, 0, [])
    node.node.holds.check(hold)
    eventually(lambda: node.node.match(kept) == 8, "what was spared can be had again")
    node.node.holds.release(hold)
    assert c.collector().sweep(c.plans(kept)).reaped.count == 8


def test_a2_a_hold_that_ends_within_a_round_leaves_no_hole_in_its_prompt(c: Cluster) -> None:
    """One sweep has spared the tail for the hold; the next one, of its parents, comes after the hold has ended."""
    node, chain = c.node(), prompt(1, 8)
    put(node, chain)
    last = part_of(chain.addresses[-1])
    tail = [plan for plan in c.plans(chain) if plan.part == last]
    others = [plan for plan in c.plans(chain) if plan.part != last]
    hold = node.node.hold(chain)
    collector = c.collector()
    assert collector.sweep(tail).spared["held"] == sum(len(plan.victims) for plan in tail)
    node.node.holds.release(hold)
    assert collector.sweep(others).reaped.count == 0 < sum(len(plan.victims) for plan in others)
    assert c.present(chain) == 8


def test_a2_what_one_of_many_holds_has_is_spared_on_every_node(c: Cluster) -> None:
    nodes, chains = [c.node() for _ in range(3)], [prompt(seed, 8) for seed in range(3)]
    for node, chain in zip(nodes, chains, strict=True):
        put(node, chain)
    holds = [node.node.hold(chain.leading(3)) for node, chain in zip(nodes, chains, strict=True)]
    report = c.collector().sweep(c.plans(*chains))
    assert (report.reaped.count, report.spared["held"]) == (15, 9)
    assert [hold.count for hold in holds] == [c.present(chain) for chain in chains] == [3, 3, 3]


def test_h1_what_is_condemned_is_a_miss_and_cannot_be_held(c: Cluster) -> None:
    node, other, chain = c.node(), c.node(), prompt(1, 8)
    put(node, chain)
    hold = looking(other, chain)
    sweep = threading.Thread(target=lambda: c.collector().sweep(c.plans(chain)))
    sweep.start()
    eventually(lambda: node.node.gc_view.leading(chain) == 0)
    assert node.node.match(chain) == 0 and node.node.hold(chain).count == 0
    assert put(node, chain) == 0, "what is being swept cannot be put again before the sweep has ended"
    other.node.holds.release(hold)
    sweep.join(PATIENCE_S)
    eventually(lambda: put(node, chain) == 8)
    assert node.node.match(chain) == 8


def test_g4_a_pinned_chunk_is_spared(c: Cluster) -> None:
    node, chain, other = c.node(), prompt(1, 8), prompt(2, 8)
    put(node, chain)
    put(node, other)
    pin = node.pin(chain, 60.0, "me")
    report = c.collector().sweep(c.plans(chain, other))
    assert report.reaped.count == 8 and report.spared["pinned"] == 8
    assert c.present(chain) == 8 and c.present(other) == 0
    assert node.node.match(chain) == 8, "what is pinned beforehand is not even condemned"
    node.unpin(pin.id)
    assert c.collector().sweep(c.plans(chain)).reaped.count == 8


def test_g7_a_sweep_left_by_a_dead_collector_is_adopted(c: Cluster) -> None:
    node, chain = c.node(), prompt(1, 8)
    put(node, chain)
    leave_in_flight(c, node, chain)
    assert c.leftovers()
    report = c.collector().adopt()
    assert report.sweeps["adopted"] > 0 and report.reaped.count == 8
    assert c.leftovers() == [] and c.present(chain) == 0


def test_v2_a_node_without_a_session_stages_under_an_id_of_its_own(c: Cluster) -> None:
    """Files in the folder of an ended session belong to puts that began in it: a collector may clear it."""
    meta = FaultyMeta(MemoryMetadata(c.store))
    node, chain = c.node(meta=meta), prompt(1, 8)
    session = node.presence.current()
    assert node.node._session() == session.id
    meta.add(meta_faulty.Rule(meta_faulty.Fault.NOT_SENT, ("grant",)))
    c.store.revoke(session.lease)
    with pytest.raises(SessionLost):
        session.check_chain()
    session.beat()
    eventually(lambda: node.node._session() != session.id)
    alone = node.node._session()
    assert put(node, chain) == 8 and node.node._session() == alone
    assert c.store.get(Keys(c.identity.root).session(SessionId(alone))) is None


def test_a_node_alone_announces_nothing_and_costs_etcd_nothing(c: Cluster) -> None:
    meta = MemoryMetadata(c.store)
    node, chain = c.node(meta=meta), prompt(1, 50)
    put(node, chain)
    before = meta.operations_count
    for _ in range(20):
        hold = node.node.hold(chain)
        node.node.holds.release(hold)
        put(node, chain)
    assert meta.operations_count - before <= 3, "keepalives may fall into it"


def test_v1_a_node_that_joins_during_a_sweep_protects_nothing_of_it(c: Cluster) -> None:
    old, chain = c.node(), prompt(1, 8)
    put(old, chain)
    hold = looking(old, chain)
    sweep = threading.Thread(target=lambda: c.collector().sweep(c.plans(chain)))
    sweep.start()
    eventually(lambda: old.node.gc_view.leading(chain) == 0)
    young = c.node()
    assert young.node.hold(chain).count == 0
    old.node.holds.release(hold)
    sweep.join(PATIENCE_S)
    assert c.present(chain) == 0 and c.leftovers() == []


def test_g2_of_two_collectors_with_one_shard_one_condemns(c: Cluster) -> None:
    node, chain = c.node(), prompt(1, 30)
    put(node, chain)
    plans = c.plans(chain)
    reports = []
    threads = [threading.Thread(target=lambda: reports.append(c.collector().sweep(plans))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(reports) == 3 and sum(report.reaped.count for report in reports) == 30
    assert c.present(chain) == 0 and c.leftovers() == []


def test_g5_a_publication_that_came_later_goes_back(c: Cluster) -> None:
    node, chain = c.node(), prompt(1, 1)
    put(node, chain)
    plans, newer = c.plans(chain), b""

    class Meddling(FaultyRoot):
        """Another incarnation gets the name just before it is taken."""

        def move(self, source: Name, name: Name, *, make_folder: bool = True) -> bool:
            nonlocal newer
            if not newer:
                newer = republish(c.root, source)
            return super().move(source, name, make_folder=make_folder)

    report = c.collector(root=Meddling(c.root)).sweep(plans)
    assert newer and report.reaped.count == 0 and report.spared["published anew"] == 1
    found = c.root.look(c.name(chain.addresses[0]), FIXED_BYTES)
    assert found is not None and found.prefix == newer[:FIXED_BYTES]
    assert c.leftovers() == []


def test_g1_a_chunk_used_since_it_was_listed_is_left_out(c: Cluster) -> None:
    node, chain = c.node(), prompt(1, 4)
    put(node, chain)
    plans = c.plans(chain)
    name = c.name(chain.addresses[0])
    stat = c.root.stat(name)
    assert stat is not None and c.root.touch(name, stat.mtime_ns + 1)
    report = c.collector().sweep(plans)
    assert report.reaped.count == 3 and report.spared["used since it was listed"] == 1
    assert c.present(chain) == 1


def test_g1_a_chain_used_during_the_look_keeps_the_parents_of_what_it_keeps(c: Cluster) -> None:
    node, chain = c.node(), prompt(1, 4)
    put(node, chain)
    plans = c.plans(chain)
    names = [c.name(address) for address in chain.addresses]

    class UsedMeanwhile(FaultyRoot):
        """All chunks of the chain are used when three of them have been looked at."""

        looks = count(1)

        def look(self, name: Name, prefix_bytes: int) -> Seen | None:
            if next(self.looks) == 4:
                for each in names:
                    stat = c.root.stat(each)
                    assert stat is not None and c.root.touch(each, stat.mtime_ns + 1)
            return super().look(name, prefix_bytes)

    report = c.collector(root=UsedMeanwhile(c.root)).sweep(plans)
    assert report.condemned.count == 0 and report.spared["used since it was listed"] == 4
    assert c.present(chain) == 4


def test_g8_a_sweep_whose_grace_does_not_end_is_abandoned_and_takes_nothing(c: Cluster) -> None:
    node, chain = c.node(), prompt(1, 8)
    put(node, chain)
    hold = looking(node, chain)
    patient = replace(TIMINGS, announce_lag_max_s=0.2, grace_max_s=0.3)

    class NeverRevoked(MemoryMetadata):
        def revoke(self, lease: LeaseId, timeout_s: float | None = None) -> None:
            """The store does not hear it."""

    report = c.collector(timings=patient, meta=NeverRevoked(c.store)).sweep(c.plans(chain))
    assert report.sweeps["abandoned"] == report.sweeps["begun"] > 0 and report.reaped.count == 0
    assert c.leftovers() == [] and c.present(chain) == 8
    eventually(lambda: node.node.match(chain) == 8)
    node.node.holds.release(hold)


def test_h4_a_session_that_never_announces_is_revoked(c: Cluster) -> None:
    node, chain = c.node(), prompt(1, 8)
    put(node, chain)
    stuck = Session.open(
        MemoryMetadata(c.store), Keys(c.identity.root), clock=SystemClock(), ids=RandomIds(), ttl_s=3600
    )
    patient = replace(TIMINGS, announce_lag_max_s=0.2)
    assert c.collector(timings=patient).sweep(c.plans(chain)).reaped.count == 8
    stuck.beat()
    assert not stuck.alive


def test_h4_a_session_that_announces_each_of_many_sweeps_in_time_is_not_revoked(c: Cluster) -> None:
    """During unbroken eviction it is behind on one of them at every look."""
    node, chain, clock = c.node(), prompt(1, 30), FakeClock()
    put(node, chain)
    node.close()
    meta = MemoryMetadata(c.store)
    slow = Session.open(meta, Keys(c.identity.root), clock=SystemClock(), ids=RandomIds(), ttl_s=3600)
    collector, report = WholeSweeper(c.site(clock=clock)), SweepReport()
    first, second = c.plans(chain)[:2]

    def look_after(lags: float) -> bool:
        clock.advance(lags * TIMINGS.announce_lag_max_s)
        return collector.advance(report)

    collector.begin([first], report)
    assert not look_after(0)
    stamp = collector._flight[0].stamp
    collector.begin([second], report)
    assert not look_after(0.6)
    slow.txn(announced=stamp)
    assert look_after(0) and not look_after(0.6)
    assert meta.get(slow.key), "it has lagged behind the second for no longer than it may"
    assert not look_after(0.6) and not meta.get(slow.key)


def test_c4_a_node_fences_the_sweeps_that_etcd_has_forgotten_before_it_protects(c: Cluster) -> None:
    node, chain = c.node(), prompt(1, 8)
    put(node, chain)
    for address in chain.addresses[4:]:  # a collector of a lost timeline was at work
        c.root.move(c.name(address), places.trashed(b"s" * 16, c.name(address), b"r" * 8))
    young = c.node()
    assert c.leftovers() == [] and c.present(chain) == 8
    assert young.node.hold(chain).count == 8
    late = places.trashed(b"s" * 16, c.name(chain.addresses[0]), b"q" * 8)
    assert not c.root.move(c.name(chain.addresses[0]), late, make_folder=False), "the fence is up"


def test_f3_a_folder_that_no_key_names_gives_back_what_is_in_it(c: Cluster) -> None:
    node, chain = c.node(), prompt(1, 8)
    put(node, chain)
    c.root.move(c.name(chain.addresses[3]), places.trashed(b"s" * 16, c.name(chain.addresses[3]), b"r" * 8))
    assert c.collector().lift_unnamed() == 1
    assert c.present(chain) == 8 and c.leftovers() == []


def test_o1_on_a_store_that_deletes_conditionally(tmp_path: Path) -> None:
    with cluster(MemoryObjectRoot()) as c:
        node, chain, other = c.node(), prompt(1, 8), prompt(2, 8)
        put(node, chain)
        put(node, other)
        node.pin(other, 60.0, "me")
        report = c.collector().sweep(c.plans(chain, other))
        assert report.reaped.count == 8 and report.spared["pinned"] == 8
        assert c.present(chain) == 0 and c.present(other) == 8
        assert not c.store.list(f"/kv/{c.identity.root.hex()}/gc/condemned/").items


def test_o1_a_store_that_can_neither_fence_nor_delete_conditionally_is_refused() -> None:
    root = MemoryRoot(MemoryFiles())
    root.traits = replace(root.traits, fenced=False)
    with cluster(root) as c, pytest.raises(InvalidRequest, match="not safe there"):
        c.collector()
