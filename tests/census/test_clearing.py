"""One clear deletes the chunks of a namespace everywhere, and nothing else (rule P5)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.census.selection import ClearOrder, Selection
from kvstore.census.walk import walk
from kvstore.core.address import Address
from kvstore.core.clock import Clock, SystemClock
from kvstore.core.operations import Cancelled, unwatched
from kvstore.engine.clear import NamespaceClear, resolved
from kvstore.errors import Unavailable
from kvstore.meta.memory import MemoryStore
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.root.posix import PosixRoot
from kvstore.tiers.disk import DiskTier
from tests.kit.census import ModelNode, closing, tokens
from tests.kit.etcd import eventually
from tests.kit.faulty_root import EIO, FaultyRoot, Hang, Rule
from tests.kit.patience import PATIENCE_S
from tests.kit.tiers import Acting, quick


@pytest.fixture(params=["memory", "posix"])
def roots(request: pytest.FixtureRequest, tmp_root: Path) -> Iterator[list[Root]]:
    files = MemoryFiles()
    (tmp_root / "root").mkdir()
    yield [MemoryRoot(files) if request.param == "memory" else PosixRoot(str(tmp_root / "root")) for _ in range(3)]


@pytest.fixture
def nodes(roots: list[Root], tmp_root: Path) -> Iterator[tuple[ModelNode, ModelNode]]:
    store = MemoryStore()
    good, bad = (
        ModelNode(root, store, label, tmp_root / label)
        for root, label in zip(roots, ("stable", "canary"), strict=False)
    )
    with closing(good, bad):
        eventually(lambda: not good.node.stats()["disk_refilling"] and not bad.node.stats()["disk_refilling"])
        yield good, bad


def disk_of(node: ModelNode) -> DiskTier:
    assert node.node.tiers is not None and node.node.tiers.disk is not None
    return node.node.tiers.disk


def to_disk(node: ModelNode, number: int, wrote: ModelNode) -> None:
    """Copies a prompt from memory to the local disk, as when memory gives it up."""
    memory = node.node.memory
    assert memory is not None
    with memory.refer(wrote.chain(number), 0, 4) as slots:
        for entry, image in zip(slots.referred, slots.images(0, 4), strict=True):
            assert disk_of(node).add(entry.place, image)


def test_after_one_clear_nobody_serves_what_it_wrote_and_everybody_what_others_wrote(
    nodes: tuple[ModelNode, ModelNode],
) -> None:
    good, bad = nodes
    for number in range(8):
        (good if number % 2 else bad).put(number)
    good.drain()
    bad.drain()
    for number in range(8):  # twice, so that each has all of it in memory
        for node in (good, bad, good, bad):
            assert node.serves(number, good if number % 2 else bad) == 4
    assert good.in_memory(0, bad) == 4
    cleared = good.member.clear_selected(bad.selection)
    assert (cleared.chunks, cleared.pinned, cleared.failed, cleared.unconfirmed) == (16, 0, 0, ())
    for node in (good, bad):
        for number in range(8):
            wrote, expected = (good, 4) if number % 2 else (bad, 0)
            assert node.in_memory(number, wrote) == expected, (node.model, number)
            assert node.serves(number, wrote) == node.match(number, wrote) == expected, (node.model, number)
    assert {each.namespace for each in good.on_root()} == {good.cache.namespace.id} and len(good.on_root()) == 16
    assert good.member.clear_selected(bad.selection).chunks == 0  # twice is harmless


def test_what_its_queue_still_had_never_reaches_the_root(nodes: tuple[ModelNode, ModelNode]) -> None:
    good, bad = nodes
    bad.put(1)
    bad.drain()
    for number in range(2, 10):
        bad.put(number)  # behind, and not waited for
    good.member.clear_selected(bad.selection)
    bad.drain()
    assert good.on_root() == [] and bad.node.stats()["behind_bytes"] == 0
    for number in range(10):
        assert bad.serves(number, bad) == 0 and bad.in_memory(number, bad) == 0


def test_what_was_demoted_to_a_local_disk_goes_too(nodes: tuple[ModelNode, ModelNode]) -> None:
    good, bad = nodes
    for node, number in ((good, 1), (bad, 2)):
        node.put(number)
        node.drain()
        assert good.serves(number, node) == good.serves(number, node) == 4
    disk = disk_of(good)
    for number in (1, 2):
        to_disk(good, number, good if number == 1 else bad)
    assert disk.leading(bad.chain(2), 0) == 4
    bad.member.clear_selected(bad.selection)
    eventually(lambda: disk.leading(bad.chain(2), 0) == 0)
    assert disk.leading(good.chain(1), 0) == 4
    assert good.serves(2, bad) == 0 and good.serves(1, good) == 4


class EarlierClock(SystemClock):
    """As if the order had been issued by a clock that is behind."""

    def now_s(self) -> float:
        return super().now_s() - 3600


def test_a_disk_that_was_away_has_only_what_was_put_after_a_clear(roots: list[Root], tmp_root: Path) -> None:
    store = MemoryStore()
    bad = ModelNode(roots[0], store, "canary")
    with closing(bad):
        with reader_with_disk(roots[1], store, tmp_root, SystemClock()) as good:
            bad.put(1)
            bad.drain()
            assert good.serves(1, bad) == good.serves(1, bad) == 4
            to_disk(good, 1, bad)
        bad.member.clear_selected(bad.selection)
        with reader_with_disk(roots[1], store, tmp_root, SystemClock()) as good:
            assert good.match(1, bad) == good.serves(1, bad) == disk_of(good).leading(bad.chain(1), 0) == 0
            bad.put(1)
            bad.drain()
            assert good.serves(1, bad) == good.serves(1, bad) == 4
            to_disk(good, 1, bad)
        with reader_with_disk(roots[1], store, tmp_root, SystemClock()) as good:
            assert disk_of(good).leading(bad.chain(1), 0) == good.serves(1, bad) == 4


@contextlib.contextmanager
def reader_with_disk(root: Root, store: MemoryStore, folder: Path, clock: Clock) -> Iterator[ModelNode]:
    node = ModelNode(root, store, "stable", folder / "disk", clock=clock)
    with closing(node):
        eventually(lambda: not node.node.stats()["disk_refilling"])
        yield node


def test_a_put_before_the_orders_were_read_stays() -> None:
    """A process that begins has nothing in memory from before a clear that was done."""
    hang = Hang()
    alone = Acting(FaultyRoot(MemoryRoot(MemoryFiles())), limits=quick(write_deadline_s=30.0, stall_s=30.0))
    with contextlib.closing(alone.member):
        assert isinstance(alone.root, FaultyRoot)
        alone.root.set_rules([Rule("publish", hang)])
        alone.put(1, 2)
        assert hang.reached.wait(PATIENCE_S)
        alone.node.refill([ClearOrder(frozenset({alone.cache.namespace.id}), alone.node.clock.now_s())])
        assert all(alone.in_memory(1, 2))
        hang.release.set()
        alone.drain()
        assert alone.get(1, 2) == 2


def test_pinned_chunks_stay_and_are_told_of_unless_they_are_meant_too(nodes: tuple[ModelNode, ModelNode]) -> None:
    good, bad = nodes
    bad.put(1)
    bad.put(2)
    bad.drain()
    with good.cache_of(bad).pin(tokens(1), ttl=60):
        seen = good.member.clear_selected(bad.selection, dry_run=True)
        assert (seen.chunks, seen.pinned) == (4, 4) and len(good.on_root()) == 8
        cleared = good.member.clear_selected(bad.selection)
        assert (cleared.chunks, cleared.pinned) == (4, 4)
        assert good.serves(1, bad) == 4 and good.serves(2, bad) == 0
        cleared = good.member.clear_selected(bad.selection, pinned=True)
        assert (cleared.chunks, cleared.pinned) == (4, 0) and good.serves(1, bad) == 0


def test_nobody_remembers_as_present_what_was_cleared(nodes: tuple[ModelNode, ModelNode]) -> None:
    """Also not of a node that has none of it in memory: a match would promise what no get finds."""
    good, bad = nodes
    bad.put(1)
    bad.drain()
    assert good.match(1, bad) == 4 and good.in_memory(1, bad) == 0
    bad.member.clear_selected(bad.selection)
    eventually(lambda: good.match(1, bad) == 0)


def test_a_clear_that_is_cancelled_may_be_repeated(nodes: tuple[ModelNode, ModelNode]) -> None:
    good, bad = nodes
    bad.put(1)
    bad.drain()

    def cancel(done: int, total: int) -> None:
        raise Cancelled("by its operator")

    with pytest.raises(Cancelled):
        good.member.clear_selected(bad.selection, cancel)
    assert good.member.clear_selected(bad.selection).unconfirmed == ()
    assert good.on_root() == [] and bad.in_memory(1, bad) == 0


def test_a_node_alone_waits_for_what_it_is_writing_or_refuses() -> None:
    """It has no follower that waits: a write in progress would be published after the sweep."""
    hang = Hang()
    limits = quick(write_deadline_s=30.0, stall_s=30.0, clear_answer_s=0.1)
    alone = Acting(FaultyRoot(MemoryRoot(MemoryFiles())), limits=limits)
    with contextlib.closing(alone.member):
        assert isinstance(alone.root, FaultyRoot)
        alone.put(1, 1)
        alone.drain()
        alone.root.set_rules([Rule("publish", hang)])
        alone.put(2, 1)
        assert hang.reached.wait(PATIENCE_S)
        try:
            with pytest.raises(Unavailable, match="clear again"):
                alone.member.clear_selected(Selection(tenant=""))
        finally:
            hang.release.set()
        assert alone.member.clear_selected(Selection(tenant="")).failed == 0
        alone.node.drain()
        assert list(walk(alone.root, alone.node.identity.shard_bits)) == []


def test_a_node_alone_whose_clear_was_cut_short_keeps_in_memory_what_it_reads_afterwards() -> None:
    def cut() -> tuple[Address, ...]:
        raise Cancelled("by its operator, before anything was deleted")

    alone = Acting(MemoryRoot(MemoryFiles()))
    with contextlib.closing(alone.member):
        alone.put(1, 2)
        alone.drain()
        clearing = NamespaceClear(alone.node, alone.member.clears, cut, is_alone=True)
        with pytest.raises(Cancelled):
            clearing.clear(resolved(alone.node, Selection(tenant="")), unwatched)
        assert not any(alone.in_memory(1, 2))
        for _ in range(2):
            assert alone.get(1, 2) == 2
        eventually(lambda: all(alone.in_memory(1, 2)))


def test_a_clear_of_a_namespace_that_the_root_refuses_or_that_takes_too_long_says_so() -> None:
    alone = Acting(FaultyRoot(MemoryRoot(MemoryFiles())))
    with contextlib.closing(alone.member):
        assert isinstance(alone.root, FaultyRoot)
        namespace = alone.cache.namespace
        alone.put(1, 3)
        alone.drain()
        alone.root.set_rules([Rule("remove", EIO, times=1)])
        with pytest.raises(Unavailable, match="1 chunks or shards stay"):
            alone.member.clear(namespace)
        hang = Hang()
        alone.root.set_rules([Rule("remove", hang)])
        with Acting(alone.root, limits=quick(clear_deadline_s=0.1)) as hasty:
            try:
                with pytest.raises(Unavailable, match="of 256 shards until the deadline: call again for the rest"):
                    hasty.member.clear(namespace)
            finally:
                hang.release.set()
        alone.member.clear(namespace)
        assert list(walk(alone.root, alone.node.identity.shard_bits)) == []


def test_what_is_being_written_when_it_is_ordered_is_waited_for(roots: list[Root]) -> None:
    """Its node has dropped the image, but read it before: it would come to the root after that was swept."""
    store, hang = MemoryStore(), Hang()
    good, bad = ModelNode(roots[0], store, "stable"), ModelNode(FaultyRoot(roots[1]), store, "canary")
    with closing(good, bad):
        bad.put(1)
        bad.drain()
        assert isinstance(bad.root, FaultyRoot)
        bad.root.set_rules([Rule("publish", hang)])
        bad.put(2, 1)
        assert hang.reached.wait(PATIENCE_S)
        clearing = threading.Thread(target=good.member.clear_selected, args=(bad.selection,))
        clearing.start()
        clearing.join(0.7)
        assert clearing.is_alive()
        hang.release.set()
        clearing.join(PATIENCE_S)
        assert good.on_root() == [] and not clearing.is_alive()
