"""What other nodes put is found at any offset, after a listing of the root (SEGMENTS.md, S10)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client import Store
from kvstore.client.local import LocalPort
from kvstore.format.places import shard_folder
from kvstore.node import encoded, segment_indexes, segment_lister
from kvstore.node.limits import Limits
from kvstore.node.segment_lister import Followed, SegmentLister
from kvstore.root import changes
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.root.posix import PosixRoot
from kvstore.segments.index import Index, windows
from tests.encodings.test_node import opened
from tests.kit import faulty_root as faulty
from tests.kit.faulty_root import FaultyRoot
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.stores import member_of, member_on
from tests.segments.test_segments import DOCUMENTS, SIZE, SYSTEM, cache_of, kv_of, prompt_of, segments_of

OFTEN = Limits(segments_follow_s=0.05, match_deadline_s=PATIENCE_S)
PROMPT, _ = prompt_of(SYSTEM, *DOCUMENTS)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first search waits for its listing however busy the machine is."""
    monkeypatch.setattr(segment_indexes, "FIRST_S", PATIENCE_S)


@pytest.fixture
def stores() -> Iterator[tuple[Store, Store]]:
    """Two nodes on one root."""
    files = MemoryFiles()
    with ExitStack() as undo:
        first, second = (undo.enter_context(Store(LocalPort(member_on(MemoryRoot(files), OFTEN)))) for _ in range(2))
        yield first, second


def put_all(store: Store, documents: slice = slice(None)) -> None:
    segments = segments_of(store)
    for document in DOCUMENTS[documents]:
        segments.put(document, kv_of(document))


def found(store: Store) -> list[int]:
    """The lengths of what is found in the prompt, at any offset."""
    return [len(match) for match in segments_of(store).find(PROMPT)]


# Over nodes


def test_s10_what_was_stored_before_is_found_by_the_first_search(stores: tuple[Store, Store]) -> None:
    first, second = stores
    put_all(first)
    cache_of(first).put(DOCUMENTS[0], kv_of(DOCUMENTS[0]))  # whose chunks are not those of segments
    assert found(second) == [24, 24, 24]


def test_s10_what_another_node_puts_later_is_found_after_the_next_listing(stores: tuple[Store, Store]) -> None:
    first, second = stores
    put_all(first, slice(1))
    assert found(second) == [24]
    put_all(first)
    eventually(lambda: found(second) == [24, 24, 24], "the others are listed")


def test_s10_nothing_is_listed_once_nobody_searches(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = stores
    put_all(first, slice(1))
    assert found(second) == [24]
    monkeypatch.setattr(segment_indexes, "IDLE_S", 0.0)
    indexes = member_of(second).node.segments

    def is_asleep() -> bool:
        with indexes._changed:
            return indexes._next() is None

    eventually(is_asleep, "the round is over")
    put_all(first)
    eventually(is_asleep)
    assert len(indexes.of(segments_of(second).namespace)) == 1


def test_s10_a_root_that_does_not_list_costs_a_wait_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_indexes, "FIRST_S", 0.0)
    root = FaultyRoot(MemoryRoot(MemoryFiles()))
    with Store(LocalPort(member_on(root))) as store:
        put_all(store, slice(1))
        root.set_rules([faulty.Rule("list", faulty.EIO)])
        assert found(store) == [24], "what this node put"


def test_s10_indexes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_indexes, "NAMESPACES_MAX", 2)
    with Store(LocalPort(member_on(MemoryRoot(MemoryFiles())))) as store:
        for name in ("a", "b", "c"):
            cache_of(store, name).segments(segments_of(store).rope, chunk_tokens=SIZE).put(
                DOCUMENTS[0], kv_of(DOCUMENTS[0])
            )
        assert len(member_of(store).node.segments._indexed) == 2


# The lister


class Listing:
    """A lister of a root, whose clock is its number of steps."""

    def __init__(self, root: Root, store: Store) -> None:
        member = member_of(store)
        self.followed = Followed(segments_of(store).namespace, Index(8))
        self._ticks = itertools.count()
        self.lister = SegmentLister(root, member.node.identity.shard_bits, lambda: float(next(self._ticks)))

    def round(self) -> None:
        """One whole round."""
        self.lister.begin([self.followed])
        assert self.lister.step(float("inf"))

    def lengths(self) -> list[int]:
        """Chunks of each document, as the index knows them."""
        firsts = [windows(document[:SIZE], SIZE)[0] for document in DOCUMENTS]
        lengths: list[int] = self.followed.index.lengths(np.array(firsts)).tolist()
        return lengths


@pytest.fixture
def root() -> FaultyRoot:
    return FaultyRoot(MemoryRoot(MemoryFiles()))


@pytest.fixture
def local(root: FaultyRoot) -> Iterator[Store]:
    with Store(LocalPort(member_on(root))) as store:
        yield store


def test_s10_a_header_is_read_once(root: FaultyRoot, local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put_all(local, slice(1))
    listing, looks = Listing(root, local), list[object]()
    look = root.look

    def counted(*args: Any) -> Any:
        looks.append(args)
        return look(*args)

    monkeypatch.setattr(root, "look", counted)
    listing.round()
    listing.round()
    assert len(looks) == 3
    put_all(local)
    listing.round()
    assert len(looks) == 9 and listing.lengths() == [3, 3, 3]


def test_s10_a_chunk_waits_for_its_parent(root: FaultyRoot, local: Store) -> None:
    put_all(local, slice(1))
    listing = Listing(root, local)
    [first, *_] = member_of(local).node.chains.of(listing.followed.namespace, DOCUMENTS[0]).addresses
    hidden = {first}
    arrived = listing.lister._arrived
    listing.lister._arrived = lambda *args: [new for new in arrived(*args) if new[1] not in hidden]  # type: ignore[method-assign]
    listing.round()
    assert listing.lengths() == [0, 0, 0]
    hidden.clear()
    listing.round()
    assert listing.lengths() == [3, 0, 0]


def test_s10_compressed_segments_are_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded, "GAIN_BYTES_MIN", 1)  # these chunks are small
    root = PosixRoot(tmp_path)
    with opened(root, compress=True) as (_, store):
        for document in DOCUMENTS:  # whose KV gets smaller, as noise does not
            segments_of(store).put(document, np.zeros_like(kv_of(document)))
        assert store.stats()["compressed_saved_bytes"] > 0
        listing = Listing(root, store)
        listing.round()
        assert listing.lengths() == [3, 3, 3]


def test_s10_chunks_that_are_followed_are_bounded(
    root: FaultyRoot, local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_lister, "CHUNKS_MAX", 3)
    put_all(local)
    listing = Listing(root, local)
    listing.round()
    assert sum(map(len, listing.lister._windows.values())) == 3


def test_s10_a_folder_is_listed_until_its_time_has_stood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change within one tick of the file system's clock shows no new time."""
    listed, times = list[str](), itertools.repeat(7)
    monkeypatch.setattr(segment_lister, "folder_time", lambda *_: next(times))

    def names(_: Root, folder: str) -> list[str]:
        listed.append(folder)
        return []

    monkeypatch.setattr(segment_lister, "list_names", names)
    with Store(LocalPort(member_on(PosixRoot(tmp_path)))) as store:
        listing = Listing(PosixRoot(tmp_path), store)
        shards = 1 << member_of(store).node.identity.shard_bits
        for expected in (shards, shards, 0, 0):
            listed.clear()
            listing.round()
            assert len(listed) == expected
        monkeypatch.setattr(segment_lister, "folder_time", lambda *_: 8)
        listed.clear()
        listing.round()
        assert len(listed) == shards


def test_s10_roots_without_times_are_listed_each_time(root: FaultyRoot, local: Store) -> None:
    assert changes.folder_time(root, shard_folder(0)) is None
    listing = Listing(root, local)
    listing.round()
    put_all(local)
    listing.round()
    assert listing.lengths() == [3, 3, 3]
