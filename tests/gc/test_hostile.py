"""Sweeps in a hostile world: bad files, foreign files, a mount that goes away, a full disk, odd keys.

Separate from the protocol's own rules, because each of these once stopped all sweeps, or let one take too much.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import PermissionDenied, RootMismatch, Unavailable
from kvstore.format import places
from kvstore.format.keyset import ChunkKeys
from kvstore.format.places import Name
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMetadata
from kvstore.meta.store import Compare, Delete, Put, TxnResult
from kvstore.meta.sweeps import Condemned
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.root.posix import PosixRoot
from kvstore_gc.threads import Stopped
from tests.kit.abandoned import in_flight, leave_in_flight
from tests.kit.clusters import Cluster, cluster, eventually, looking, prompt, prompt_of_one_sweep, put
from tests.kit.faulty_root import EIO, ENOSPC, Fails, FaultyRoot, Rule
from tests.kit.object_root import MemoryObjectRoot
from tests.kit.patience import PATIENCE_S

EPERM = Fails(PermissionDenied, errno.EPERM)
SWEEP = b"s" * 16


@pytest.fixture
def on_files(tmp_root: Path) -> Iterator[Cluster]:
    (tmp_root / "root").mkdir()
    with cluster(PosixRoot(tmp_root / "root")) as made:
        yield made


# One bad file


@pytest.mark.parametrize("fault", [EIO, EPERM], ids=["EIO", "EPERM"])
@pytest.mark.parametrize(("operation", "why"), [("look", "cannot be read"), ("move", "cannot be taken")])
def test_a_file_that_cannot_be_looked_at_or_taken_stays_and_all_others_go(
    c: Cluster, operation: str, why: str, fault: Fails
) -> None:
    node, chain, later = c.node(), prompt(1, 8), prompt(2, 4)
    put(node, chain)
    put(node, later)
    root = FaultyRoot(c.root, [Rule(operation, fault, c.name(chain.addresses[3]).__eq__)])
    report = c.collector(root).sweep(c.plans(chain))
    assert report.reaped.count == 7 and report.spared[why] == 1
    assert c.present(chain) == 1 and c.leftovers() == []
    assert c.collector(root).sweep(c.plans(chain, later)).reaped.count == 4, "the next round works as well"
    root.set_rules(())
    assert c.collector(root).sweep(c.plans(chain)).reaped.count == 1 and c.leftovers() == []


@pytest.mark.parametrize("fault", [EIO, EPERM], ids=["EIO", "EPERM"])
@pytest.mark.parametrize("operation", ["look", "remove"])
def test_what_cannot_be_looked_at_or_deleted_is_set_aside_and_its_sweep_closes(
    c: Cluster, operation: str, fault: Fails
) -> None:
    node, chain = c.node(), prompt(1, 8)
    bad = chain.addresses[3].hex()
    root = FaultyRoot(c.root, [Rule(operation, fault, lambda name: name.startswith("trash/") and bad in name)])
    for already_count in range(2):
        eventually(lambda: put(node, chain) == 8)
        assert len(quarantine(c)) == already_count
        c.collector(root).sweep(c.plans(chain))
        assert c.present(chain) == 0 and c.leftovers() == []
        assert len(quarantine(c)) == already_count + 1 and all(name.startswith(bad) for name in quarantine(c))


def test_a_sweep_that_cannot_be_emptied_is_left_and_the_others_close() -> None:
    with cluster(shard_bits=2) as c:
        node, chain = c.node(), prompt(1, 30)
        put(node, chain)
        bad = c.name(chain.addresses[3])
        mine = [Rule(operation, EIO, _in_trash(bad)) for operation in ("remove", "move")]
        report = c.collector(FaultyRoot(c.root, mine)).sweep(c.plans(chain))
        assert report.sweeps["left"] == 1 and report.reaped.count == 29
        assert len(in_flight(c)) == 1
        assert c.collector().adopt().reaped.count == 1
        assert c.leftovers() == [] and c.present(chain) == 0


@pytest.mark.parametrize("fault", [EIO, EPERM], ids=["EIO", "EPERM"])
@pytest.mark.parametrize("made", [MemoryRoot, MemoryObjectRoot])
def test_a_sweep_whose_plan_cannot_be_read_takes_nothing_and_closes(made: type[MemoryRoot], fault: Fails) -> None:
    with cluster(made()) as c:
        node, chain = c.node(), prompt_of_one_sweep()
        put(node, chain)
        leave_in_flight(c, node, chain)
        (plan,) = c.root.list(places.PLANS)
        root = FaultyRoot(c.root, [Rule("open", fault, lambda name: name.endswith(plan.name))])
        assert c.collector(root).adopt().reaped.count == 0
        assert c.present(chain) == 8 and in_flight(c) == []
        assert c.collector(root).sweep(c.plans(chain)).reaped.count == 8, "the next round works"


# Foreign things in the trash


@pytest.mark.parametrize("by", ["a collector", "a node that starts"])
def test_f3_foreign_things_in_an_unnamed_folder_are_set_aside_and_the_chunks_go_back(
    on_files: Cluster, tmp_root: Path, by: str
) -> None:
    c, chain = on_files, prompt(1, 8)
    put(c.node(), chain)
    c.root.move(c.name(chain.addresses[3]), places.trashed(SWEEP, c.name(chain.addresses[3]), b"r" * 8))
    litter(tmp_root / "root" / places.trash_folder(SWEEP))
    if by == "a collector":
        assert c.collector().lift_unnamed() == 1
    else:
        assert c.node().node.hold(chain).count == 8
    assert c.present(chain) == 8 and c.leftovers() == []
    assert_set_aside(tmp_root / "root", SWEEP)


def test_g6_foreign_things_in_the_folder_of_a_sweep_are_set_aside_and_it_closes(
    on_files: Cluster, tmp_root: Path
) -> None:
    c, chain = on_files, prompt_of_one_sweep()
    node = c.node()
    put(node, chain)
    leave_in_flight(c, node, chain)
    (sweep,) = in_flight(c)
    folder = tmp_root / "root" / places.trash_folder(sweep.sweep)
    litter(folder)
    # Named like ours, but not files: their content cannot be read.
    name = c.name(chain.addresses[0])
    (tmp_root / "root" / places.trashed(sweep.sweep, name, b"q" * 8)).mkdir()
    (tmp_root / "root" / places.trashed(sweep.sweep, name, b"p" * 8)).symlink_to("/does/not/exist")
    assert c.collector().adopt().reaped.count == 8
    assert c.present(chain) == 0 and c.leftovers() == []
    assert_set_aside(tmp_root / "root", sweep.sweep)


# What cannot be listed, or is no twin


@pytest.mark.parametrize("folder", ["pins", "pins/me"])
def test_c5_pins_that_cannot_be_listed_are_not_none(
    on_files: Cluster, tmp_root: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    c, chain = on_files, prompt(1, 8)
    twin_without_ref(c, chain)
    stale, scandir = str(tmp_root / "root" / folder), os.scandir

    def scan(path: str) -> Any:
        if os.fspath(path) == stale:
            raise OSError(errno.ESTALE, "Stale file handle", path)
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scan)
        with pytest.raises(Unavailable, match="pins"):
            c.collector().sweep(c.plans(chain))
    assert c.present(chain) == 8 and c.leftovers() == []
    assert c.collector().sweep(c.plans(chain)).spared["pinned"] == 8


def _becomes_a_link(twin: Path) -> None:
    twin.rename(twin.parents[2] / "elsewhere")
    twin.symlink_to(twin.parents[2] / "elsewhere")


def _becomes_a_fifo(twin: Path) -> None:
    twin.unlink()
    os.mkfifo(twin)


def _becomes_a_folder(twin: Path) -> None:
    twin.unlink()
    twin.mkdir()


def _its_folder_becomes_a_link(twin: Path) -> None:
    twin.parent.rename(twin.parents[2] / "elsewhere")
    twin.parent.symlink_to(twin.parents[2] / "elsewhere")


@pytest.mark.parametrize("change", [_becomes_a_link, _becomes_a_fifo, _becomes_a_folder, _its_folder_becomes_a_link])
def test_c5_what_is_no_twin_any_more_stops_collectors_and_is_named(
    on_files: Cluster, tmp_root: Path, change: Callable[[Path], None]
) -> None:
    c, chain = on_files, prompt(1, 8)
    name = twin_without_ref(c, chain)
    change(tmp_root / "root" / name)
    named = "pins/me" if change is _its_folder_becomes_a_link else name
    with pytest.raises(RootMismatch, match=named):
        c.collector().sweep(c.plans(chain))
    assert c.present(chain) == 8 and c.leftovers() == []


# Several lift one folder


def test_f3_many_may_lift_one_folder_at_once(on_files: Cluster, tmp_root: Path) -> None:
    c, chain = on_files, prompt(1, 50)
    put(c.node(), chain)
    trash_all(c, chain)
    together = threading.Barrier(6)

    def lift(_: int) -> None:
        waited: list[str] = []

        def step(point: str) -> None:
            if point == "publish.before" and not waited:
                waited.append(point)
                together.wait(PATIENCE_S)  # all have listed the whole folder before the first chunk goes back

        c.collector(PosixRoot(tmp_root / "root", step=step)).lift_unnamed()

    with ThreadPoolExecutor(together.parties) as threads:
        list(threads.map(lift, range(together.parties)))
    assert_back_once(c, chain, tmp_root / "root")


# A mount that went away


def test_g6_an_unmounted_root_lifts_no_fence_and_its_sweep_stays_open(on_files: Cluster, tmp_root: Path) -> None:
    c, chain = on_files, prompt_of_one_sweep()
    node = c.node()
    put(node, chain)
    leave_in_flight(c, node, chain)
    mounted, away = tmp_root / "root", tmp_root / "away"
    mounted.rename(away)
    mounted.mkdir()
    (sweep,) = in_flight(c)
    with pytest.raises(Unavailable, match="mounted"):
        list(c.root.list(places.shard_folder(0)))
    with pytest.raises(Unavailable, match="mounted"):
        c.root.remove_folder(places.trash_folder(sweep.sweep), durable=True)
    with pytest.raises(Unavailable, match="mounted"):
        c.collector().adopt()
    assert in_flight(c) == [sweep] and list(mounted.iterdir()) == []
    mounted.rmdir()
    away.rename(mounted)
    assert c.collector().adopt().reaped.count == 8 and c.leftovers() == []


# A full disk


@pytest.mark.parametrize(("operation", "place"), [("stage", "staging/"), ("make_folder", "trash/")])
def test_on_a_full_root_the_reserve_makes_room_for_a_plan_and_is_made_again(
    c: Cluster, operation: str, place: str
) -> None:
    node, chain, later = c.node(), prompt(1, 8), prompt(2, 8)
    put(node, chain)
    put(node, later)
    c.collector().sweep([])
    assert c.root.stat(places.RESERVE)
    full = Rule(operation, ENOSPC, lambda name: name.startswith(place) and c.root.stat(places.RESERVE) is not None)
    root = FaultyRoot(c.root, [full])
    assert c.collector(root).sweep(c.plans(chain)).reaped.count == 8
    assert c.root.stat(places.RESERVE) and c.leftovers() == [], "spent, and made again"
    assert c.collector(root).sweep(c.plans(later)).reaped.count == 8, "and once more"
    assert c.root.stat(places.RESERVE) and c.leftovers() == []


def test_a_root_without_any_room_but_the_reserve_can_be_swept() -> None:
    files = MemoryFiles()
    with cluster(MemoryRoot(files), shard_bits=2) as c:
        node, chain = c.node(), prompt(1, 8)
        put(node, chain)
        c.collector().sweep([])
        files.capacity_bytes = files.used_bytes
        assert c.collector().sweep(c.plans(chain)).reaped.count == 8 and c.leftovers() == []
        assert c.root.stat(places.RESERVE), "there is room for it again"


def test_with_the_reserve_spent_the_plans_for_which_there_was_room_are_swept() -> None:
    with cluster(shard_bits=2) as c:
        node, chain = c.node(), prompt(1, 30)
        put(node, chain)
        plans = c.plans(chain)
        assert len(plans) > 2
        # The first call is for the reserve, which is not there; then one plan, and no room for the next.
        rules = [Rule("stage", ENOSPC, times=1), Rule("stage", ENOSPC, nth=3)]
        report = c.collector(FaultyRoot(c.root, rules)).sweep(plans)
        assert report.sweeps["begun"] == 1 and report.reaped.count == len(plans[0].victims)
        assert report.condemned.count == report.reaped.count
        assert c.present(chain) == 30 - report.reaped.count and c.leftovers() == []
        assert c.collector().sweep(c.plans(chain)).reaped.count == 30 - report.reaped.count


# Two runs of one sweep


def abandon_after_another_made_it_final(c: Cluster, chain: ChunkKeys) -> None:
    """One run abandons a sweep at the moment at which another has made its list final, and has deleted three."""
    node = c.node()
    put(node, chain)
    hold = looking(node, chain)

    def meanwhile(_: float) -> None:
        node.node.holds.release(hold)
        eventually(lambda: node.presence.current().announced > 0)
        assert c.collector(FaultyRoot(c.root, [Rule("remove_if", EIO, nth=4)])).adopt().sweeps["left"] == 1
        raise Stopped

    with pytest.raises(Stopped):
        c.collector(pause=meanwhile).sweep(c.plans(chain))


def test_g8_a_sweep_that_was_not_abandoned_after_all_can_be_finished() -> None:
    with cluster(MemoryObjectRoot()) as c:
        chain = prompt_of_one_sweep()
        abandon_after_another_made_it_final(c, chain)
        (left,) = in_flight(c)
        assert left.is_final and c.present(chain) == 5, "what a run may still delete, the sweep must outlive"
        assert c.collector().adopt().reaped.count == 5, "nothing was pinned: the final list is the plan"
        assert c.present(chain) == 0 and c.leftovers() == []


class FinishedMeanwhile(MemoryMetadata):
    """Somebody else finishes a sweep between the transaction that began it and whatever its collector does next."""

    def __init__(self, c: Cluster, reply: bool) -> None:
        super().__init__(c.store)
        self.begun: list[bytes] = []
        self._finish = c.collector().adopt
        self._reply = reply

    def txn(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], timeout_s: float | None = None
    ) -> TxnResult:
        result = super().txn(compares, operations, timeout_s)
        begun = [one.value for one in operations if isinstance(one, Put) and "/gc/condemned/" in one.key]
        if begun and result.succeeded:
            self.begun += [Condemned.from_bytes(value).sweep for value in begun]
            self._finish()
            if not self._reply:
                raise Unavailable("the reply was lost")
        return result


@pytest.mark.parametrize("reply", [True, False], ids=["answered", "reply lost"])
def test_g2_a_transaction_that_has_begun_sweeps_is_never_repeated(c: Cluster, reply: bool) -> None:
    node, chain = c.node(), prompt_of_one_sweep()
    put(node, chain)
    meta = FinishedMeanwhile(c, reply)
    c.collector(meta=meta).sweep(c.plans(chain))
    assert len(meta.begun) == 1, "sweep ids are never used again"
    assert c.present(chain) == 0 and c.leftovers() == []


# Keys that are not ours, or not there


def test_c1_a_chain_that_is_garbage_is_named(c: Cluster) -> None:
    node, chain = c.node(), prompt(1, 8)
    put(node, chain)
    keys = Keys(c.identity.root)
    MemoryMetadata(c.store).put(keys.gc_seq, b"[" * 100_000)
    with pytest.raises(RootMismatch, match=f"{keys.gc_seq} cannot be read.*fsck --adopt"):
        c.collector().sweep(c.plans(chain))
    assert c.present(chain) == 8


def _in_trash(name: Name) -> Callable[[Name], bool]:
    last = name.rpartition("/")[2]
    return lambda entry: entry.startswith("trash/") and last in entry


def quarantine(c: Cluster) -> list[str]:
    return [entry.name for entry in c.root.list(places.QUARANTINE)]


def litter(folder: Path) -> None:
    """Puts things into a folder of the trash that no collector makes."""
    (folder / "mine").mkdir(parents=True)
    (folder / "mine" / "keep").write_bytes(b"kept")
    (folder / "notes.txt").write_bytes(b"notes")
    (folder / "nowhere").symlink_to("/does/not/exist")


def assert_set_aside(root: Path, sweep: bytes) -> None:
    """All of the litter is in the quarantine, as it was."""
    prefix = root / places.QUARANTINE / f"foreign.{sweep.hex()}."
    assert Path(f"{prefix}mine", "keep").read_bytes() == b"kept"
    assert Path(f"{prefix}notes.txt").read_bytes() == b"notes"
    assert os.readlink(f"{prefix}nowhere") == "/does/not/exist"


def twin_without_ref(c: Cluster, chain: ChunkKeys) -> Name:
    """Pins a chain and makes etcd forget it; returns the twin's name."""
    node = c.node()
    put(node, chain)
    owner, _, pin = node.pin(chain, 60.0, "me").id.rpartition("/")
    (ref,) = c.store.list(Keys(c.identity.root).refs).items
    assert MemoryMetadata(c.store).delete(ref.key)
    return places.twin(owner, bytes.fromhex(pin))


def trash_all(c: Cluster, chain: ChunkKeys) -> None:
    """A collector that etcd has forgotten had taken all of a chain."""
    for address in chain.addresses:
        assert c.root.move(c.name(address), places.trashed(SWEEP, c.name(address), b"r" * 8))


def assert_back_once(c: Cluster, chain: ChunkKeys, root: Path) -> None:
    """Every chunk has its name, and no other."""
    assert c.present(chain) == len(chain.addresses) and c.leftovers() == []
    assert {(root / c.name(address)).stat().st_nlink for address in chain.addresses} == {1}
