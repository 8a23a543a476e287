"""One cycle of a collector on real nodes; and of several collectors of one root, of which one works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from unittest.mock import ANY

import pytest

from kvstore.core.clock import SystemClock
from kvstore.core.recency import NS_PER_S
from kvstore.engine.settings import Limits
from kvstore.errors import RootMismatch, Unavailable
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore_gc.capacity import Pressure
from kvstore_gc.config import Config
from kvstore_gc.cycle import FRESH_S, Cycle
from kvstore_gc.membership import Collectors
from kvstore_gc.threads import Stopped
from tests.kit.abandoned import leave_in_flight
from tests.kit.clusters import NODE_LIMITS, NOT_LINGERING, SPACE, cluster, eventually, looking, prompt, put, site_of
from tests.kit.fake_meta import FakeClock
from tests.kit.faulty_meta import Fault, FaultyMeta
from tests.kit.faulty_meta import Rule as MetaRule
from tests.kit.faulty_root import EIO, FaultyRoot, Hang, Rule
from tests.kit.patience import PATIENCE_S
from tests.kit.place import LONG_S, Place
from tests.kit.stores import SetClock


def test_a_round_deletes_what_is_past_its_time_and_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    node, old, new = place.cluster.node(), prompt(1, 6), prompt(2, 4)
    put(node, old)
    put(node, new)
    place.age(old)
    size = place.bytes_of(old)
    hold, pause = looking(node, new), place.stop.pause

    def let_go(seconds: float) -> None:
        """Ends the hold that the round waits for."""
        node.node.holds.release(hold)
        pause(seconds)

    monkeypatch.setattr(place.stop, "pause", let_go)
    summary = place.cycle(Config(ttl_s=600)).run()
    assert (place.cluster.present(old), place.cluster.present(new)) == (0, 4)
    assert (summary.reaped.count, summary.reaped.bytes, summary.unfinished) == (6, size, [])
    assert summary.used_after_bytes == summary.used_before_bytes - size == place.bytes_of(new)
    assert place.cluster.leftovers() == []
    told = summary.to_json()
    assert told["chosen"] == {"past its time to live": {"chunks": 6, "bytes": size}}
    assert told["kept"] == {"within capacity": {"chunks": 4, "bytes": place.bytes_of(new)}}
    assert [(each["name"], each["scanned"]["chunks"]) for each in told["namespaces"]] == [(SPACE.name, 10)]
    assert {"check", "survey", "plan", "condemn", "grace", "reap", "close"} <= set(told["seconds"])
    assert "chosen_past_its_time_to_live=6" in summary.to_line() and "unfinished" not in summary.to_line()


def test_a_cycle_brings_a_full_root_below_its_target_leaves_first(place: Place) -> None:
    node, chains = place.cluster.node(), [prompt(number, 5) for number in range(4)]
    for number, chain in enumerate(chains):
        put(node, chain)
        place.age(chain, LONG_S * (4 - number))
    used = sum(map(place.bytes_of, chains))
    summary = place.cycle(Config(max_bytes=used)).run()
    assert summary.unfinished == [] and summary.target_bytes is not None
    assert summary.used_after_bytes <= summary.target_bytes == int(0.95 * used)
    assert [place.cluster.present(chain) for chain in chains] == [4, 5, 5, 5], "1 of 20 chunks, the oldest leaf"
    assert node.node.match(chains[0]) == 4


def test_a_listing_that_lacks_a_shard_lowers_no_level(place: Place) -> None:
    chain, root, pressure = prompt(1, 5), FaultyRoot(place.cluster.root), Pressure(place.cluster.site(), 1 << 30)
    put(place.cluster.node(), chain)
    cycle = place.cycle(root=root, pressure=pressure)
    for rules in ([], [Rule("list", EIO, place.cluster.name(chain.addresses[0]).startswith)]):
        root.set_rules(rules)
        cycle.run()
        assert pressure.level is not None and pressure.level.used_bytes == place.bytes_of(chain)


def test_of_prompts_put_within_a_second_the_older_goes_first(place: Place) -> None:
    node, older, newer = place.cluster.node(), prompt(1, 6), prompt(2, 6)
    clock = SystemClock()
    for chain in (older, newer):
        put(node, chain)
        ended_s = clock.now_s()
        eventually(lambda ended_s=ended_s: clock.now_s() > ended_s + FRESH_S)  # type: ignore[misc]
    chunk_bytes = place.bytes_of(older) // 6
    summary = place.cycle(Config(max_bytes=int(9.01 * chunk_bytes / 0.95))).run()
    assert summary.reaped.count >= 3
    assert place.cluster.present(older) == 6 - summary.reaped.count and place.cluster.present(newer) == 6


def test_a_root_of_chunks_just_put_waits_and_is_not_full(place: Place) -> None:
    node, chain = place.cluster.node(), prompt(1, 8)
    put(node, chain)
    stat = place.cluster.root.stat(place.cluster.name(chain.addresses[0]))
    assert stat is not None
    put_s = stat.mtime_ns / NS_PER_S
    clock = SetClock(put_s)
    site = place.cluster.site(clock=clock)
    config = Config(max_bytes=place.bytes_of(chain))
    pressure = Pressure(site, config.max_bytes)
    cycle = Cycle(site, config, pressure)
    assert cycle.run().reaped.count == 0 and not pressure.accounts.is_full
    clock.wall_s = put_s + 2 * FRESH_S
    assert cycle.run().reaped.count > 0


def test_what_is_pinned_stays_and_a_round_that_cannot_make_room_says_so(place: Place) -> None:
    node, chain = place.cluster.node(), prompt(1, 5)
    put(node, chain)
    place.age(chain)
    node.pin(chain, 3600, "me")
    summary = place.cycle(Config(max_bytes=place.bytes_of(chain) // 2)).run()
    assert place.cluster.present(chain) == 5
    assert summary.to_json()["kept"]["pinned"]["chunks"] == 5
    assert [said for said in summary.unfinished if "over the target" in said]


def test_slices_after_one_that_spared_held_chunks_take_others(place: Place) -> None:
    node, kept, other = place.cluster.node(), prompt(1, 6), prompt(2, 6)
    put(node, kept)
    put(node, other)
    place.age(kept)
    place.age(other, 60)
    hold = node.node.hold(kept)
    node.node.holds._used = lambda wanted: None  # as where a root keeps no times
    config = Config(max_bytes=place.bytes_of(kept) + place.bytes_of(other))
    pressure = Pressure(place.cluster.site(), config.max_bytes)
    summary = place.cycle(config, pressure=pressure).run()
    assert summary.spared["held"] > 0 and not pressure.excess_bytes
    assert summary.reaped.count == 6 - place.cluster.present(other) > 0
    assert place.cluster.present(kept) == hold.count == 6


def test_a2_held_chunks_are_not_chosen_by_the_next_round(place: Place) -> None:
    node, chain = place.cluster.node(), prompt(1, 6)
    put(node, chain)
    place.age(chain)
    node.node.holds._used = lambda wanted: None  # as where a root keeps no times
    hold = node.node.hold(chain)
    rounds = place.cycle(Config(ttl_s=60.0))
    assert [rounds.run().spared["held"] for _ in range(2)] == [6, 0]
    assert place.cluster.present(chain) == hold.count == 6


@pytest.mark.parametrize("limits", [NODE_LIMITS, NOT_LINGERING], ids=["lingers", "gone"])
@pytest.mark.parametrize("renews", [True, False])
def test_a_prompt_whose_hold_ends_between_rounds_keeps_its_prefix(place: Place, limits: Limits, renews: bool) -> None:
    """A hold does not linger where its node has died; a root that keeps no times renews nothing."""
    node, once, other = place.cluster.node(limits=limits), prompt(1, 12), prompt(2, 12)
    put(node, once)
    put(node, other)
    place.age(once)
    place.age(other, 60)
    if not renews:
        node.node.holds._used = lambda wanted: None
    rounds = place.cycle(Config(max_bytes=place.bytes_of(once) + place.bytes_of(other)))
    hold = node.node.hold(once)
    assert rounds.run().spared["held"] > 0
    node.node.holds.release(hold)
    for _ in range(3):
        rounds.run()
        there = [place.cluster.root.stat(place.cluster.name(address)) is not None for address in once.addresses]
        assert there == sorted(there, reverse=True), "what is kept can be reached"


def test_a_dry_run_says_the_same_and_changes_nothing_at_all(place: Place) -> None:
    node, chain = place.cluster.node(), prompt(1, 6)
    put(node, chain)
    place.age(chain)
    place.cycle().run()  # what the first round makes is there
    root, meta = FaultyRoot(place.cluster.root), FaultyMeta(MemoryMetadata(place.cluster.store))
    tree, keys = place.tree(), MemoryMetadata(place.cluster.store).list("/kv/")
    rounds = place.cycle(Config(max_bytes=place.bytes_of(chain) // 2), root=root, meta=meta)
    summary = rounds.dry_run()
    assert place.tree() == tree
    assert MemoryMetadata(place.cluster.store).list("/kv/").revision == keys.revision
    assert not set(root.calls) & {"stage", "publish", "discard", "touch", "move", "make_folder", "remove"}
    done = place.cycle(Config(max_bytes=place.bytes_of(chain) // 2)).run()
    assert done.to_json()["chosen"] == summary.to_json()["chosen"]
    assert done.used_after_bytes == summary.used_after_bytes


def test_a_collector_does_not_run_on_an_etcd_that_does_not_know_the_root(place: Place) -> None:
    put(place.cluster.node(), prompt(1, 3))
    foreign = MemoryMetadata()
    for run in (place.cycle(Config(ttl_s=0), meta=foreign).run, place.cycle(Config(ttl_s=0), meta=foreign).dry_run):
        with pytest.raises(RootMismatch, match="fsck"):
            run()
    assert place.cluster.present(prompt(1, 3)) == 3


def test_a_round_stopped_in_its_middle_is_finished_by_the_next(place: Place) -> None:
    node, chain = place.cluster.node(), prompt(1, 8)
    put(node, chain)
    place.age(chain)

    striking = Rule("move", Hang(), nth=3, times=1)
    root = FaultyRoot(place.cluster.root, [striking])
    config, first = Config(ttl_s=60), Place(place.cluster)
    rounds = first.cycle(config, root=root)
    crashed = threading.Thread(target=lambda: _quietly(rounds.run), daemon=True)
    crashed.start()
    assert isinstance(striking.fault, Hang) and striking.fault.reached.wait(PATIENCE_S)
    summary = place.cycle(config).run()
    assert summary.sweeps["adopted"] > 0 and summary.unfinished == []
    striking.fault.release.set()
    crashed.join(PATIENCE_S)
    assert place.cluster.present(chain) == 0
    place.cycle(config).run()
    assert place.cluster.leftovers() == []


def _quietly(work: Callable[[], object]) -> None:
    try:
        work()
    except Unavailable:
        pass


def test_the_wish_to_end_during_a_grace_leaves_the_root_as_it_was(place: Place) -> None:
    node, chain = place.cluster.node(), prompt(1, 4)
    put(node, chain)
    place.age(chain)
    hold = looking(node, chain)
    ended: list[type[BaseException]] = []

    def run() -> None:
        try:
            place.cycle(Config(ttl_s=60)).run()
        except Stopped as stopped:
            ended.append(type(stopped))

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: node.node.gc_view.leading(chain) < 4)
    place.stop.ask()
    thread.join(PATIENCE_S)
    assert ended == [Stopped] and place.cluster.present(chain) == 4
    node.node.holds.release(hold)
    assert place.cluster.leftovers() == []


def test_the_room_of_the_file_system_is_the_limit_where_none_is_given() -> None:
    files = MemoryFiles(capacity_bytes=100_000)
    with cluster(MemoryRoot(files)) as made:
        place, chains = Place(made), [prompt(number, 10) for number in range(2)]
        node = made.node()
        put(node, chains[0])
        place.age(chains[0])
        put(node, chains[1])
        files.capacity_bytes = files.used_bytes + 1000
        summary = place.cycle().run()
        assert summary.capacity_bytes is not None and summary.capacity_bytes < files.capacity_bytes
        assert summary.reaped.count > 0 and made.present(chains[1]) == 10


@pytest.mark.parametrize("lost", [0, 2])
def test_chunks_without_their_parent_are_the_first_victims(place: Place, lost: int) -> None:
    node, torn, older = place.cluster.node(), prompt(1, 6), prompt(2, 6)
    put(node, torn)
    put(node, older)
    place.age(torn)
    place.age(older, 2 * LONG_S)
    assert place.cluster.root.remove(place.cluster.name(torn.addresses[lost]))
    cycle = place.cycle(Config(max_bytes=1 << 30))
    assert cycle.run().to_json()["chosen"] == {"without its parent": {"chunks": 5 - lost, "bytes": ANY}}
    assert (place.cluster.present(torn), place.cluster.present(older)) == (lost, 6)
    assert not cycle.run().chosen


def test_a_collector_whose_put_stayed_unknown_is_listed_once() -> None:
    clock, keys = FakeClock(), Keys(bytes(16))
    meta = FaultyMeta(MemoryMetadata(MemoryStore(clock)))
    meta.add(MetaRule(Fault.REPLY_LOST, ("put",), times=1))
    one = Collectors(site_of(meta, clock=clock))
    with pytest.raises(Unavailable):
        one.beat()
    one.beat()
    assert len(meta.list(keys.collectors).items) == 1


def test_of_two_collectors_one_works_and_the_other_takes_over(place: Place) -> None:
    sites = [place.cluster.site() for _ in range(2)]
    collectors = [Collectors(site) for site in sites]
    pressures = [Pressure(site, 1 << 30, mine) for site, mine in zip(sites, collectors, strict=True)]
    cycles = [Cycle(sites[at], Config(ttl_s=60), pressures[at], collectors[at]) for at in range(2)]
    node, first, later = place.cluster.node(), prompt(1, 12), prompt(2, 12)
    for pressure in pressures:
        pressure.tick()
    put(node, first)
    place.age(first)
    assert [cycle.run().reaped.count for cycle in reversed(cycles)] == [0, 12]
    assert not cycles[1].is_spent and cycles[1].evict() is None
    put(node, later)
    leave_in_flight(place.cluster, node, later)
    collectors[0].close()

    def takes_over() -> bool:
        pressures[1].tick()
        return cycles[1].is_spent

    eventually(takes_over)
    assert cycles[1].run().sweeps["adopted"] > 0
    assert place.cluster.leftovers() == [] and place.cluster.present(later) == 0 and not cycles[1].is_spent
    pressures[1].accounts.forget()
    assert cycles[1].is_spent, "another one led for a moment"
