"""Lists the segments that a root has for the indexes of a node: what other nodes put, and what was put before it began.

A round looks at every shard, in steps that end in time. Only names are listed; a header is read once for each chunk. A
folder whose time has not changed is left out, once it was listed with that time twice: changes within one tick of the
file system's clock show no new time. Used by one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from kvstore.address import CHAIN_CHUNKS_MAX, Address
from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.format.encoded import decode_any
from kvstore.format.encoded import header_bytes as encoded_header_bytes
from kvstore.format.header import PAGE_BYTES, Damaged
from kvstore.format.places import Name
from kvstore.namespace import Namespace, NamespaceId
from kvstore.root.changes import folder_time, list_names
from kvstore.root.interface import Root
from kvstore.segments.index import Index, windows

log = logging.getLogger(__name__)

CHUNKS_MAX = 262_144
"""Chunks of segments that are followed, of all namespaces together: about 200 bytes of memory each. Others are found
where boundaries are given, or after this node put or found them.
"""
NOTHING = 0
"""Stands for the hash of a segment that is not known: no window has it."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The header of a chunk, as far as it matters. ``window`` is the hash of a first chunk's tokens."""

    depth: int
    address: Address
    parent: Address
    window: int
    index: Index


@dataclass(frozen=True, slots=True, eq=False)
class Followed:
    """A namespace whose segments are listed, and the index that learns them."""

    namespace: Namespace
    index: Index


class SegmentLister:
    """The chunks of segments on one root, as far as they were listed. ``seconds`` is a monotonic clock."""

    def __init__(self, root: Root, shard_bits: int, seconds: Callable[[], float]) -> None:
        self._root = root
        self._shard_bits = shard_bits
        self._seconds = seconds
        self._next = 0
        self._followed: dict[NamespaceId, Followed] = {}
        self._times: dict[int, tuple[int, bool]] = {}
        """The time of a shard's folder before it was listed, and whether it was the same the time before."""
        self._windows: dict[int, dict[Address, int]] = {}
        """By shard, the chunks that are there: the hash of the first chunk of each one's segment, or NOTHING."""
        self._count = 0
        self._waiting: list[_Chunk] = []
        """Chunks whose parents were not seen yet."""

    def begin(self, followed: Iterable[Followed]) -> None:
        """Begins a round. A namespace that was not followed before makes it a listing of everything."""
        found = {each.namespace.id: each for each in followed}
        if any(self._followed.get(id) is not each for id, each in found.items()):
            self._times, self._windows, self._count, self._waiting = {}, {}, 0, []
        self._followed = found
        self._next = 0

    def step(self, ends_s: float) -> bool:
        """Goes on with the round until ``ends_s``; True at its end. What it found is in the indexes then."""
        found: list[_Chunk] = []
        while self._next < 1 << self._shard_bits and self._seconds() < ends_s:
            if not self._list(self._next, ends_s, found):
                break
            self._next += 1
        self._learn(found)
        return self._next == 1 << self._shard_bits

    def _list(self, shard: int, ends_s: float, found: list[_Chunk]) -> bool:
        """Lists a shard and reads what is new; False if the time was not enough for all of it."""
        folder = places.shard_folder(shard)
        try:
            time, before = folder_time(self._root, folder), self._times.get(shard)
            if time is not None and before == (time, True):
                return True
            names = list_names(self._root, folder)
        except KVStoreError as error:
            log.debug("segments.not_listed folder=%s why=%s", folder, error)  # in the next round
            return True
        new = self._arrived(shard, names)
        for at, (name, address, followed) in enumerate(new):
            if self._count >= CHUNKS_MAX:
                break
            if at and self._seconds() >= ends_s:
                return False
            self._windows[shard][address] = NOTHING
            self._count += 1
            chunk = self._read(Name(f"{folder}/{name}"), address, followed)
            if chunk is not None:
                found.append(chunk)
        if time is not None:
            self._times[shard] = (time, before is not None and before[0] == time)
        return True

    def _arrived(self, shard: int, names: Sequence[str]) -> list[tuple[str, Address, Followed]]:
        """Returns the chunks of a shard that are new, and forgets those that are gone."""
        known = self._windows.get(shard, {})
        there: dict[Address, int] = {}
        new = []
        for name in names:
            parsed = places.parse_chunk(name)
            followed = self._followed.get(parsed[1]) if parsed is not None else None
            if parsed is None or followed is None:
                continue
            if parsed[0] in known:
                there[parsed[0]] = known[parsed[0]]
            else:
                new.append((name, parsed[0], followed))
        self._windows[shard] = there
        self._count += len(there) - len(known)
        return new

    def _read(self, name: Name, address: Address, followed: Followed) -> _Chunk | None:
        """Returns what a header says; None if it is damaged, encrypted, of another chunk, or gone."""
        layout = followed.namespace.layout
        tokens_bytes = 4 * layout.chunk_tokens
        with suppress(KVStoreError, Damaged):
            seen = self._root.look(name, encoded_header_bytes(tokens_bytes, layout.section_count) + PAGE_BYTES)
            header = decode_any(seen.prefix) if seen is not None else None
            if (
                header is not None
                and (header.namespace, header.address) == (followed.namespace.digest, address)
                and len(header.identity) == tokens_bytes
                and header.depth < CHAIN_CHUNKS_MAX
            ):
                window = NOTHING
                if not header.depth:
                    window = int(windows(np.frombuffer(header.identity, "<u4"), layout.chunk_tokens)[0])
                return _Chunk(header.depth, address, header.parent, window, followed.index)
        return None

    def _learn(self, found: list[_Chunk]) -> None:
        """Tells the indexes of chunks whose segment is known by now; the others wait for their parents."""
        if not found:
            return
        lengths: dict[Index, dict[int, int]] = {}
        waiting: list[_Chunk] = []
        for chunk in sorted([*self._waiting, *found], key=lambda each: each.depth):
            there = self._windows.get(places.shard(chunk.address, self._shard_bits), {})
            if chunk.address not in there:
                continue  # it is gone
            window = chunk.window or self._window(chunk.parent)
            if window == NOTHING:
                waiting.append(chunk)
                continue
            there[chunk.address] = window
            of_index = lengths.setdefault(chunk.index, {})
            of_index[window] = max(of_index.get(window, 0), chunk.depth + 1)
        self._waiting = waiting
        for index, chunks in lengths.items():
            index.add(np.array([*chunks], np.uint64), np.array([*chunks.values()], np.uint32))

    def _window(self, address: Address) -> int:
        return self._windows.get(places.shard(address, self._shard_bits), {}).get(address, NOTHING)
