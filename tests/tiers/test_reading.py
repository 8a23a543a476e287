"""Reading from memory, the local disk and the root at once (MEMORY.md, I1, R1, R2, R5)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core import executor
from kvstore.core.clock import SystemClock
from kvstore.core.executor import Deadline
from kvstore.core.recency import Hints
from kvstore.core.write_mode import WriteMode
from tests.kit.patience import NEVER_S
from tests.kit.scattering import damage_on_disk, read, restore, scatter
from tests.kit.stores import SetClock, flip, fresh
from tests.kit.tiers import QUICK, Acting, eventually, faulty, on_posix


@pytest.fixture(params=["faulty", "posix"])
def node(request: pytest.FixtureRequest, tmp_root: Path) -> Iterator[Acting]:
    """With a local disk; over a root in memory, and over one that native code reads."""
    root = on_posix(tmp_root / "root") if request.param == "posix" else faulty()
    with Acting(root, disk=tmp_root / "disk") as acting:
        yield acting


@pytest.mark.parametrize("way", ["get", "view", "layers", "read_into"])
def test_i1_damage_by_any_way_of_reading(node: Acting, way: str) -> None:
    """Dropped from the tier that it was found in; then from the root."""
    for number, place in ((1, "m"), (2, "d")):
        scatter(node, number, ["m", "m", place, "m"])
        if place == "m":
            node.damage(number, 2)
        else:
            damage_on_disk(node, number, 2)
        assert read(node, number, 4, way) == 2, "a miss: nobody else has it"
        assert not node.in_memory(number, 4)[2] and not node.on_disk(number, 4)[2]
        assert node.put(number, 4, first=0, write=WriteMode.THROUGH).tokens_present == 4 * node.size
        assert read(node, number, 4, way) == 4
    assert node.stat("memory_damaged") == 1 and node.stat("disk_damaged") == 1
    node.assert_settled()


@pytest.mark.parametrize("way", ["get", "view", "layers", "read_into"])
def test_i1_a_damaged_file_of_the_disk_is_removed_and_read_from_the_root(node: Acting, way: str) -> None:
    scatter(node, 1, list("mdmd"))
    restore(node, 1, 4)
    damage_on_disk(node, 1, 1)
    assert all(node.on_root(1, 4))
    assert read(node, 1, 4, way) == 4
    assert node.stat("disk_damaged") == 1 and node.on_disk(1, 4)[1] is False
    assert read(node, 1, 4, way) == 4


def test_a_damaged_file_of_the_root_is_set_aside_unless_memory_has_it(tmp_root: Path) -> None:
    for way in ("get", "view", "layers", "read_into"):
        folder = fresh(tmp_root)
        with Acting(on_posix(folder / "root")) as node:
            node.put(1, 4)
            node.drain()
            flip(folder / "root" / node.name(1, 2), 9_000)
            assert read(node, 1, 4, way) == 4, "memory has it"
            node.forget(1, 4, first=2)
            for _ in range(3):
                assert read(node, 1, 4, way) == 2, "also when it is worth bringing into memory"
            assert not node.in_memory(1, 4)[2]
            # Damage of memory means bad hardware.
            assert (node.stat("miss_damaged"), node.stat("memory_damaged")) == (1, 0)
            assert node.stat("quarantined") == 1 and not node.on_root(1, 4)[2]
            assert node.put(1, 4).tokens_present == 4 * node.size
            node.drain()
            assert read(node, 1, 4, way) == 4 and all(node.on_root(1, 4))
            node.assert_settled()


def test_r2_what_only_the_root_has_comes_into_memory_from_the_second_time_on(node: Acting) -> None:
    node.put(1, 6, write=WriteMode.UNCACHED)
    assert node.get(1, 6) == 6 and not any(node.in_memory(1, 6))
    assert node.get(1, 6) == 6 and all(node.in_memory(1, 6))
    hits = node.stat("memory_hits")
    assert node.get(1, 6) == 6 and node.stat("memory_hits") == hits + 6


@pytest.mark.parametrize("way", ["get", "view", "layers", "read_into"])
def test_mixed_places_by_any_way_of_reading(node: Acting, way: str) -> None:
    """R1, R4: in memory, on the disk and on the root."""
    for number, order in enumerate(("mdr", "rdm", "dmr"), 1):
        scatter(node, number, [each for each in order for _ in range(2)])
        assert node.match(number, 6) == 6, order
        for _ in range(3):
            assert read(node, number, 6, way) == 6, order
    node.assert_settled()


def test_r5_uses_served_by_memory_renew_recency_on_the_root() -> None:
    clock = SetClock(1_000_000.0)
    with Acting(faulty(), clock=clock) as node:
        node.put(1, 3)
        node.drain()
        root = node.root.inner  # type: ignore[attr-defined]
        before = [root.stat(node.name(1, index)).mtime_ns for index in range(3)]
        clock.wall_s += 3 * QUICK.quantum_s
        assert node.get(1, 3) == 3 and node.stat("bytes_read") == 0
        node.drain()
        after = [root.stat(node.name(1, index)).mtime_ns for index in range(3)]
        assert all(new > old for new, old in zip(after, before, strict=True))


def test_demotion_keeps_memory_free_and_takes_what_was_used_twice(node: Acting) -> None:
    eventually(lambda: not node.stat("disk_refilling"))
    node.put(1, 20, hints=Hints(30))
    node.drain()
    assert node.get(1, 20) == 20
    for number in range(2, 35):  # no more at a time than is kept free: those that go are written before
        node.put(number, 3)
        node.drain()
        node.tiers.demote_once()
        assert node.memory.free_bytes >= node.memory.size_bytes // 16
    assert all(here or there for here, there in zip(node.in_memory(1, 20), node.on_disk(1, 20), strict=True))
    assert any(node.on_disk(1, 20)), "used, and then evicted"
    assert node.stat("memory_evicted") >= 40
    assert not any(any(node.on_disk(number, 3)) for number in range(2, 35)), "put and never read: no one-hit wonders"
    node.lose(1, 20)
    assert node.get(1, 20) == 20
    disk = node.tiers.disk
    assert disk is not None
    entry = disk._refer(node.chain(1, 20).addresses[19])
    assert entry is not None and entry.hints.priority == 30, "hints live on"
    disk._unrefer(entry, used=False)


def test_each_chunk_that_comes_from_a_slow_root_shows_that_it_does_not_hang(
    node: Acting, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.put(1, 6, write=WriteMode.UNCACHED)
    steps = list[int]()
    monkeypatch.setattr(executor._local, "tick", lambda: steps.append(1), raising=False)
    node.node.reader.bring(node.chain(1, 6), 0, 6, Deadline(SystemClock(), NEVER_S), even_once=True, even_root=True)
    assert node.in_memory(1, 6) == [True] * 6 and len(steps) >= 6
