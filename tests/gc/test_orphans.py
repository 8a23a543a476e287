"""Orphans: which files are removed, which stay, and the races in between."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.core.namespace import NamespaceDigest
from kvstore.errors import RootMismatch
from kvstore.format import places
from kvstore.format.places import Name
from kvstore.meta.keys import Keys, PinId, SweepId
from kvstore.meta.memory import MemoryMetadata
from kvstore.meta.pins import StoredPin
from kvstore.meta.session import Session
from kvstore.meta.sweeps import Condemned
from kvstore.root.fences import list_twins, write_twin
from kvstore.root.interface import Root, StorageSpace
from kvstore.root.memory import MemoryRoot
from kvstore_gc.capacity import Pressure
from kvstore_gc.leftovers import Orphans
from kvstore_gc.site import Site, Timings
from tests.kit.damage import NOW_S, Filled, fill, read, write
from tests.kit.fake_meta import CountingIds
from tests.kit.faulty_root import EACCES, EIO, Delay, FaultyRoot, Rule

TIMINGS = Timings()
DEAD = bytes.fromhex("dd" * 16)
NEW_S, OLD_S = 0.0, 10 * 86_400.0


class WallClock:
    """Wall and monotonic time as the test says, beginning when the chunks of ``fill`` were written."""

    def __init__(self) -> None:
        self.time_s = NOW_S

    def now_s(self) -> float:
        return self.time_s

    def monotonic_s(self) -> float:
        return self.time_s


class Scene:
    """A root with chunks, an etcd, and the orphans of both."""

    def __init__(self, root: Root | None = None) -> None:
        self.clock = WallClock()
        self.root = root or MemoryRoot()
        self.filled: Filled = fill(self.root)
        self.keys = Keys(self.filled.identity.root)
        self.meta = MemoryMetadata(clock=self.clock)
        self.ids = CountingIds()
        self.orphans = self.again()

    def again(self, pressure: Pressure | None = None) -> Orphans:
        """Another collector, which remembers nothing."""
        return Orphans(self.site(), pressure)

    def site(self, root: Root | None = None) -> Site:
        return Site(root or self.root, self.filled.identity, self.meta, self.clock, timings=TIMINGS)

    def write(self, name: Name, content: bytes = b"x", age_s: float = NEW_S) -> Name:
        write(self.root, name, content, age_s=age_s)
        return name

    def session(self) -> bytes:
        return self.open_session().id

    def open_session(self) -> Session:
        return Session.open(self.meta, self.keys, clock=self.clock, ids=self.ids, ttl_s=3600)

    def names(self, folder: Name) -> list[str]:
        return sorted(entry.name for entry in self.root.list(folder))


@pytest.fixture
def scene() -> Scene:
    return Scene()


# Staging


def test_staged_files_of_a_dead_session_go_with_their_folder(scene: Scene) -> None:
    scene.write(places.staged(DEAD, 1), age_s=OLD_S)
    scene.write(places.staged(DEAD, 2), age_s=OLD_S)
    assert scene.orphans.remove() == {"staging": 2}
    assert scene.names(places.STAGING) == []


def test_a_live_session_keeps_what_it_staged_however_old(scene: Scene) -> None:
    alive = scene.session()
    scene.write(places.staged(alive, 1), age_s=OLD_S)
    assert not scene.orphans.remove()
    assert scene.names(places.staging_folder(alive)) == ["1.part"]


def test_a_staged_file_that_was_never_stamped_goes_at_once(scene: Scene) -> None:
    """On NFS, if its writer was killed between creating it and stamping it."""
    alive = scene.session()
    scene.write(places.staged(alive, 1), age_s=-2 * TIMINGS.staging_age_s)
    scene.write(places.staged(DEAD, 1), age_s=-2 * TIMINGS.staging_age_s)
    scene.write(places.staged(DEAD, 2), age_s=-0.9 * TIMINGS.staging_age_s)
    assert scene.again().remove() == {"staging": 1}
    assert scene.names(places.staging_folder(DEAD)) == ["2.part"]
    assert scene.names(places.staging_folder(alive)) == ["1.part"]


def test_a_session_that_begins_while_staging_is_listed_is_seen_alive(scene: Scene) -> None:
    begun: list[bytes] = []

    def begin(_: float) -> None:
        begun.append(scene.session())
        scene.write(places.staged(begun[0], 1), age_s=OLD_S)

    listing = Rule("list", Delay(1), lambda name: name == places.STAGING, times=1)
    root = FaultyRoot(scene.root, [listing], sleep=begin)
    orphans = Orphans(scene.site(root))
    assert not orphans.remove(), "its folder was seen, so its key must be: sessions are read after the folders"
    assert scene.names(places.staging_folder(begun[0])) == ["1.part"]


# Quarantine


def test_a_whole_file_goes_back_to_its_own_name(scene: Scene) -> None:
    name, content = scene.filled.name(2), read(scene.root, scene.filled.name(2))
    aside = places.quarantined(scene.filled.chain.addresses[2], DEAD, 1)
    assert scene.root.move(name, aside)
    assert scene.orphans.remove() == {"restored": 1}
    assert read(scene.root, name) == content and scene.names(places.QUARANTINE) == []


def test_a_whole_file_never_replaces_a_newer_one(scene: Scene) -> None:
    name = scene.filled.name(2)
    newer = read(scene.root, name)
    scene.write(places.quarantined(scene.filled.chain.addresses[2], DEAD, 1), scene.filled.content(2))
    assert scene.orphans.remove() == {"restored": 1}
    assert read(scene.root, name) == newer and scene.names(places.QUARANTINE) == []


def test_a_damaged_file_is_kept_for_a_day(scene: Scene) -> None:
    damaged = bytearray(scene.filled.content(1))
    damaged[-1] ^= 1
    aside = scene.write(places.quarantined(scene.filled.chain.addresses[1], DEAD, 1), bytes(damaged))
    assert not scene.orphans.remove()
    scene.clock.time_s += TIMINGS.quarantine_age_s - 1
    assert not scene.orphans.remove()
    scene.clock.time_s += 2
    assert scene.orphans.remove() == {"quarantine": 1}
    assert read(scene.root, aside) is None


def pressure_of(scene: Scene, used_bytes: int, free_bytes: int) -> Pressure:
    pressure = Pressure(scene.site(), None)
    pressure.after_listing(used_bytes)
    pressure.accounts.measured(StorageSpace(None, free_bytes))
    return pressure


def set_aside(scene: Scene, number: int, size_bytes: int, age_s: float) -> Name:
    return scene.write(places.quarantined(scene.filled.chain.addresses[1], DEAD, number), b"x" * size_bytes, age_s)


def test_on_a_full_root_damaged_files_go_at_once_and_whole_ones_go_back(scene: Scene) -> None:
    aside = places.quarantined(scene.filled.chain.addresses[2], DEAD, 9)
    assert scene.root.move(scene.filled.name(2), aside)
    for number in range(3):
        set_aside(scene, number, 4, 0.0)
    assert scene.again(pressure_of(scene, 960, 40)).remove() == {"quarantine": 3, "restored": 1}
    assert scene.names(places.QUARANTINE) == [] and read(scene.root, scene.filled.name(2)) is not None


def test_a_file_that_cannot_be_read_stays_and_keeps_nobody_from_the_others() -> None:
    root = FaultyRoot(MemoryRoot(), [])
    scene = Scene(root)
    first = set_aside(scene, 1, 4, OLD_S)
    aside = places.quarantined(scene.filled.chain.addresses[2], DEAD, 9)
    assert scene.root.move(scene.filled.name(2), aside)
    root.set_rules([Rule("open", EACCES, lambda name: name == first)])
    assert scene.orphans.remove() == {"restored": 1}, "it may be the root that fails"
    assert root.inner.stat(first) is not None


def test_what_people_put_in_quarantine_stays(scene: Scene) -> None:
    scene.write(Name("quarantine/look-at-this"), age_s=OLD_S)
    scene.write(Name(f"quarantine/{DEAD.hex()}.{DEAD.hex()}"), age_s=OLD_S)
    assert not scene.orphans.remove()
    assert len(scene.names(places.QUARANTINE)) == 2


# Plans


def plan_of(number: int) -> tuple[SweepId, Name]:
    sweep = SweepId(number.to_bytes(16, "big"))
    return sweep, places.plan(sweep, bytes(16))


def test_a_plan_that_no_sweep_names_goes_when_it_is_old(scene: Scene) -> None:
    named, named_plan = plan_of(1)
    scene.meta.put(scene.keys.condemned_in(0), Condemned.of_victims(named, bytes(16), []).to_bytes())
    scene.write(named_plan, age_s=OLD_S)
    scene.write(plan_of(2)[1], age_s=OLD_S)
    young = scene.write(plan_of(3)[1], age_s=TIMINGS.plan_age_s - 60)
    foreign = scene.write(Name("plans/holiday"), age_s=OLD_S)
    assert scene.orphans.remove() == {"plans": 1}
    kept = sorted(name.rpartition("/")[2] for name in (named_plan, young, foreign))
    assert scene.names(places.PLANS) == kept


def test_a_sweep_that_cannot_be_understood_ends_it(scene: Scene) -> None:
    scene.meta.put(scene.keys.condemned_in(0), b"of the future")
    plan = scene.write(plan_of(2)[1], age_s=OLD_S)
    with pytest.raises(RootMismatch):
        scene.orphans.remove()
    assert read(scene.root, plan) is not None


# Twins


def twin(scene: Scene, number: int, expires_s: float) -> StoredPin:
    record = StoredPin(
        PinId(number.to_bytes(16, "big")), "a/b", NamespaceDigest(bytes(32)), 4, 60, expires_s, b"a" * 16
    )
    write_twin(scene.root, record.owner, record.id, record.to_bytes(), ids=scene.ids, clock=scene.clock)
    return record


def test_a_twin_goes_long_after_its_pin_s_end_unless_there_is_a_key(scene: Scene) -> None:
    ended, kept, fresh = (twin(scene, number, NOW_S + 60 * (number == 3) * 200) for number in (1, 2, 3))
    scene.meta.put(scene.keys.ref(kept.owner, kept.id), kept.to_bytes())
    assert not scene.orphans.remove(), "within the margin for clocks that disagree"
    scene.clock.time_s += TIMINGS.twin_margin_s + 1
    assert scene.orphans.remove() == {"twins": 1}
    assert set(list_twins(scene.root)) == {places.twin(one.owner, one.id) for one in (kept, fresh)}
    assert places.twin(ended.owner, ended.id) not in set(list_twins(scene.root))


def test_a_damaged_twin_stays(scene: Scene) -> None:
    name = scene.write(places.twin("owner", bytes(16)), b"torn", age_s=OLD_S)
    assert not scene.orphans.remove()
    assert read(scene.root, name) == b"torn"


# Failures


def test_a_root_that_refuses_one_kind_keeps_nobody_from_the_others() -> None:
    root = FaultyRoot(MemoryRoot(), [Rule("list", EIO, lambda name: name == places.QUARANTINE)])
    scene = Scene(root)
    scene.write(places.staged(DEAD, 1), age_s=OLD_S)
    scene.write(plan_of(2)[1], age_s=OLD_S)
    assert scene.orphans.remove() == {"staging": 1, "plans": 1, "failed": 1}


def test_the_wish_to_end_is_heard_between_files(scene: Scene) -> None:
    for number in range(5):
        scene.write(places.staged(DEAD, number), age_s=OLD_S)
    calls = iter(range(3))
    with pytest.raises(StopIteration):
        Orphans(replace(scene.site(), pause=lambda _: next(calls))).remove()
    assert len(scene.names(places.staging_folder(DEAD))) == 2
    assert scene.again().remove() == {"staging": 2}
