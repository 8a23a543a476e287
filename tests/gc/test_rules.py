"""Rules of the protocol that only a certain order of steps shows: each order is forced, none is waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvstore.core.buffers import BufferLoan
from kvstore.errors import RootMismatch
from kvstore.format import places
from kvstore.format.header import Generation
from kvstore.format.keyset import ChunkKeys
from kvstore.format.places import Name
from kvstore.meta.keys import Keys, SessionId
from kvstore.meta.memory import MemoryMetadata
from kvstore.meta.store import Delete, Put
from kvstore.root.fences import lift
from kvstore.root.interface import Stat
from kvstore.root.memory import MemoryRoot
from kvstore_gc.deletion import Deleting, SweepOutcome, read_victims
from kvstore_gc.grace import Spared
from kvstore_gc.ledger import SweepStore
from kvstore_gc.threads import Stopped
from tests.kit.abandoned import Died, die, leave_in_flight, republish
from tests.kit.clusters import SPACE, Cluster, cluster, eventually, looking, prompt, prompt_of_one_sweep, put
from tests.kit.faulty_root import EIO, FaultyRoot, Rule
from tests.kit.hooked_meta import ActingMeta
from tests.kit.object_root import MemoryObjectRoot
from tests.kit.sweeping import WholeSweeper


class Noted(FaultyRoot):
    """A root that records which files were moved, and which folders were made."""

    def __init__(self, inner: MemoryRoot) -> None:
        super().__init__(inner)
        self.moved: list[Name] = []
        self.made: list[Name] = []

    def move(self, source: Name, name: Name, *, make_folder: bool = True) -> bool:
        self.moved.append(name)
        return super().move(source, name, make_folder=make_folder)

    def make_folder(self, name: Name) -> None:
        self.made.append(name)
        super().make_folder(name)


def noted(c: Cluster) -> Noted:
    assert isinstance(c.root, MemoryRoot)
    return Noted(c.root)


def left_in_grace(c: Cluster, chain: ChunkKeys) -> None:
    """Leaves a sweep of a chain in flight, whose collector died in the grace; nobody holds anything."""
    node = c.node()
    put(node, chain)
    leave_in_flight(c, node, chain)
    node.close()


def test_h2_a_hold_is_registered_before_the_root_is_looked_at(c: Cluster) -> None:
    put(c.node(), prompt(1, 8))
    seen: list[int] = []

    class Looked(MemoryRoot):
        def stat(self, name: Name) -> Stat | None:
            if name.startswith(places.CHUNKS):
                seen.append(len(young.node.holds))
            return super().stat(name)

    assert isinstance(c.root, MemoryRoot)
    young = c.node(root=Looked(c.root.files))
    assert young.node.hold(prompt(1, 8)).count == 8
    assert seen and set(seen) == {1}


def test_g4_a_session_that_cannot_be_read_is_waited_for(c: Cluster) -> None:
    """It may be a newer version's: what its node has announced is not known."""
    node, chain = c.node(), prompt(1, 8)
    put(node, chain)
    node.close()
    meta = MemoryMetadata(c.store)
    meta.put(Keys(c.identity.root).session(SessionId(b"x" * 16)), b"?", meta.grant(3600))
    with pytest.raises(Died):
        c.collector(pause=die).sweep(c.plans(chain))
    assert c.present(chain) == 8


def test_g4_the_grace_of_a_sweep_is_of_every_session(c: Cluster) -> None:
    old, chain = c.node(), prompt(1, 8)
    put(old, chain)
    hold = looking(c.node(), chain)
    with pytest.raises(Died):
        c.collector(pause=lambda _: die(0) if old.presence.current().announced else None).sweep(c.plans(chain))
    assert c.present(chain) == 8 and hold.count == 8


def test_g4_a_pin_put_until_the_grace_is_over_is_spared(c: Cluster) -> None:
    node, chain, other = c.node(), prompt(1, 8), prompt(2, 8)
    put(node, chain)
    put(node, other)
    hold, pins = looking(node, chain), list[object]()

    def meanwhile(_: float) -> None:
        """Puts the pin and releases its hold, as ``pin`` does, after everything was condemned."""
        if not pins:
            pins.append(node._pins.pin("me", chain.addresses, 60, hold.tokens, SPACE.digest))
            node.node.holds.release(hold)
        eventually(lambda: node.presence.current().announced > 0)

    report = c.collector(pause=meanwhile).sweep(c.plans(chain, other))
    assert pins and c.present(chain) == 8
    assert (c.present(other), report.reaped.count, report.spared["pinned"]) == (0, 8, 8)


def test_c3_a_sweep_whose_key_went_after_the_read_that_decides_takes_nothing(c: Cluster) -> None:
    """The store was restored in between: nodes of the restored one know nothing of the sweep."""
    node, chain = c.node(), prompt(1, 8)
    put(node, chain)
    node.close()
    meta, keys = ActingMeta(c.store), Keys(c.identity.root)

    def restored(prefix: str) -> None:
        if prefix == keys.prefix:
            for kv in c.store.list(keys.condemned).items:
                MemoryMetadata(c.store).delete(kv.key)

    meta.listed = restored
    assert c.collector(meta=meta).sweep(c.plans(chain)).reaped.count == 0
    assert c.present(chain) == 8


def test_c5_a_pin_that_only_its_twin_remembers_is_spared(c: Cluster) -> None:
    node, chain, keys = c.node(), prompt(1, 8), Keys(c.identity.root)
    put(node, chain)
    node.pin(chain, 60.0, "me")
    for kv in c.store.list(keys.refs).items:
        MemoryMetadata(c.store).delete(kv.key)
    report = c.collector().sweep(c.plans(chain))
    assert report.reaped.count == 0 and report.spared["pinned"] == 8 and c.present(chain) == 8


def test_c6_root_and_etcd_are_compared_again_before_anything_is_taken(c: Cluster) -> None:
    node, chain = c.node(), prompt(1, 8)
    put(node, chain)
    hold = looking(node, chain)
    keys, meta = Keys(c.identity.root), MemoryMetadata(c.store)

    def adopted(_: float) -> None:
        node.node.holds.release(hold)
        eventually(lambda: node.presence.current().announced > 0)
        meta.put(keys.generation, Generation(9, bytes(16)).to_json())

    with pytest.raises(RootMismatch):
        c.collector(pause=adopted).sweep(c.plans(chain))
    assert c.present(chain) == 8


def test_g5_each_run_has_names_of_its_own_in_the_trash(c: Cluster) -> None:
    """A name used twice could be replaced between another run's look and its unlink."""
    node, chain, root = c.node(), prompt(1, 1), noted(c)
    for _ in range(2):
        eventually(lambda: put(node, chain) == 1)
        assert c.collector(root=root).sweep(c.plans(chain)).reaped.count == 1
    runs = [name.rpartition(".")[2] for name in root.moved]
    assert len(runs) == len({*runs}) == 2


def test_g6_the_fence_is_up_before_the_key_goes(c: Cluster) -> None:
    node, chain, meta = c.node(), prompt(1, 8), ActingMeta(c.store)
    put(node, chain)
    node.close()
    folders: list[int] = []

    def writing(operations: Sequence[Put | Delete]) -> None:
        if any(isinstance(one, Delete) and "/gc/condemned/" in one.key for one in operations):
            folders.append(len(list(c.root.list(places.TRASH))))

    meta.writing = writing
    assert c.collector(meta=meta).sweep(c.plans(chain)).reaped.count == 8
    assert folders and not any(folders)


def test_g8_a_collector_that_is_stopped_while_it_takes_closes_all_its_sweeps(c: Cluster) -> None:
    node, chain = c.node(), prompt(1, 30)
    put(node, chain)
    site = c.site()

    def stopping(count: int, work: Callable[[int], object]) -> None:
        if work.__name__ != "reap":
            site.each(count, work)
        else:
            work(0)
            raise Stopped

    plans = c.plans(chain)
    with pytest.raises(Stopped):
        WholeSweeper(replace(site, each=stopping)).sweep(plans)
    assert len(plans) > 1 and c.present(chain) == 30 - len(plans[0].victims)
    assert c.leftovers() == []


def test_g8_a_sweep_in_which_another_run_has_taken_something_is_not_abandoned(c: Cluster) -> None:
    node, chain = c.node(), prompt(1, 1)
    put(node, chain)
    hold = looking(node, chain)
    with pytest.raises(Died):
        c.collector(pause=die).sweep(c.plans(chain))
    (folder,) = c.root.list(places.TRASH)
    assert c.root.move(
        c.name(chain.addresses[0]),
        places.trashed(bytes.fromhex(folder.name), c.name(chain.addresses[0]), b"r" * 8),
        make_folder=False,
    )
    collector = c.collector()
    collector._abandon(list(collector._ledger.in_flight().values()), report := collector.sweep([]), "a test")
    assert report.sweeps["abandoned"] == 0 and len(collector._ledger.in_flight()) == 1
    node.node.holds.release(hold)


def test_f2_only_the_creator_of_a_sweep_makes_its_folder(c: Cluster) -> None:
    left_in_grace(c, prompt(1, 8))
    root = noted(c)
    assert c.collector(root=root).adopt().reaped.count == 8
    assert not [name for name in root.made if name.startswith(places.TRASH)]


def test_f3_a_folder_that_a_key_names_by_now_is_left_alone(c: Cluster) -> None:
    """Its sweep was condemned after the names were read: its files are its own."""
    node, chain, sweep = c.node(), prompt(1, 2), b"s" * 16
    put(node, chain)
    for address in chain.addresses:
        c.root.move(c.name(address), places.trashed(sweep, c.name(address), b"r" * 8))
    named = iter([False, True])
    assert not lift(c.root, sweep, c.identity.shard_bits, lambda: next(named))
    assert c.present(chain) == 0 and len(list(c.root.list(places.trash_folder(sweep)))) == 2


def test_o1_a_publication_that_came_later_stays() -> None:
    with cluster(MemoryObjectRoot()) as c:
        left_in_grace(c, prompt(1, 1))
        newer = republish(c.root, c.name(prompt(1, 1).addresses[0]))
        assert c.collector().adopt().reaped.count == 0
        reader = c.root.open(c.name(prompt(1, 1).addresses[0]))
        assert reader is not None and reader.stat.size_bytes == len(newer)


def test_o1_every_run_deletes_from_the_list_that_became_final() -> None:
    """Ours was made before another run's became final, on which something is spared that was pinned since."""
    with cluster(MemoryObjectRoot()) as c:
        left_in_grace(c, prompt_of_one_sweep())
        ledger = SweepStore(c.site())
        (sweep,) = ledger.in_flight().values()
        victims = read_victims(c.root, sweep.sweep, sweep.record.plan_checksum)
        assert victims is not None and len(victims) == 8
        ours, theirs = (Deleting(c.site(), ledger) for _ in range(2))
        assert theirs._settle(sweep, victims[:3]) is not None
        ours.reap(sweep, victims, Spared.of([]), SweepOutcome())
        assert c.present(prompt_of_one_sweep()) == 5


@pytest.mark.parametrize("failing", [1, 5])
def test_o1_a_sweep_closes_only_when_all_of_its_list_is_gone(failing: int) -> None:
    with cluster(MemoryObjectRoot()) as c:
        left_in_grace(c, prompt_of_one_sweep())
        report = c.collector(FaultyRoot(c.root, [Rule("remove_if", EIO, nth=4, times=failing)])).adopt()
        assert report.sweeps["left"] == 1 and report.spared["cannot be taken"] == failing
        assert c.present(prompt_of_one_sweep()) == failing
        assert [key for key in c.leftovers() if "/gc/condemned/" in key]


def test_o1_a_delete_that_misses_keeps_its_sweep_open() -> None:
    with cluster(MemoryObjectRoot()) as c:
        left_in_grace(c, prompt_of_one_sweep())

        class Missing(FaultyRoot):
            """Each object is another version by the time it would be deleted."""

            def remove_if(self, name: Name, seen: object) -> bool:
                return False

        assert c.collector(Missing(c.root)).adopt().sweeps["left"] == 1
        assert c.present(prompt_of_one_sweep()) == 8 and [key for key in c.leftovers() if "/gc/condemned/" in key]


def test_a_plan_that_was_changed_takes_nothing(c: Cluster) -> None:
    """It would take another publication than the one that was condemned, or another chunk."""
    left_in_grace(c, prompt(1, 8))
    for entry in list(c.root.list(places.PLANS)):
        name = Name(f"{places.PLANS}/{entry.name}")
        reader = c.root.open(name)
        assert reader is not None
        content = bytearray(reader.stat.size_bytes)
        reader.read([memoryview(content)], 0, BufferLoan())
        content[-1] ^= 1
        c.root.remove(name)
        staged = places.staged(b"z" * 16, 0)
        c.root.stage(staged, [memoryview(content)], stamp_ns=1, durable=False)
        assert c.root.publish(staged, name, durable=False)
    assert c.collector().adopt().reaped.count == 0
    assert c.present(prompt(1, 8)) == 8 and c.leftovers() == []
