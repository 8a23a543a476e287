"""The chunks of one namespace as the root has them, and as they were last published.

Events are the differences between both. A chunk is published if its file exists, no sweep or clear condemns it, its
identity is known, and its parent is published: what a ``get`` would read, and nothing else (EVENTS.md, section 2).
Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvstore.core.address import NO_PARENT, Address, chunk_address
from kvstore.format import places


@dataclass(frozen=True, slots=True)
class EventBlock:
    """The content of an event: one chunk, or one block that an engine hashed itself."""

    address: Address
    parent: Address
    """Zero for the first of a prompt."""
    depth: int
    tokens: bytes
    """Token ids as little-endian u32."""
    hash: int
    """Its name in events: 64 bits of a chunk's address, or of an engine's hash."""
    parent_hash: int | None
    group: int | None = None
    """The engine's number of this kind of KV; None for a chunk."""
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] | None = None

    @property
    def is_plain(self) -> bool:
        """True if tokens alone lead to it."""
        return self.lora_name is None and self.extra_keys is None


class IndexEntry:
    """The state of one address: a file of the root, or the parent of some."""

    __slots__ = ("address", "block", "children", "is_condemned", "is_present", "is_published", "parent", "path")

    def __init__(self, address: Address) -> None:
        self.address = address
        self.block: EventBlock | None = None
        """None while its file was not read."""
        self.parent: IndexEntry | None = None
        self.children: set[IndexEntry] = set()
        self.path: Address | None = None
        """The address that a chunk with its tokens behind the same prefix has, by which prompts find it."""
        self.is_present = self.is_condemned = self.is_published = False

    @property
    def is_readable(self) -> bool:
        """True if it can be read, given its parent."""
        return self.is_present and self.block is not None and not self.is_condemned

    @property
    def is_next(self) -> bool:
        """True if it continues what is published. The depths of blocks are claims: so none is its own ancestor."""
        if self.block is None or not self.block.depth:
            return True
        above = self.parent
        if above is None or above.block is None or not above.is_published:
            return False
        return above.block.depth + 1 == self.block.depth


@dataclass(frozen=True, slots=True)
class Difference:
    """Blocks to publish: first the removed ones, then the stored ones, parents first."""

    removed: list[EventBlock]
    stored: list[EventBlock]


class NamespaceIndex:
    """One namespace. Used by one thread, or under its owner's lock."""

    def __init__(self, digest: bytes, shard_bits: int) -> None:
        """``digest`` is the namespace's."""
        self._digest = digest
        self._shard_bits = shard_bits
        self._shards: dict[int, dict[Address, IndexEntry]] = {}
        self._published_by_hash: dict[int, IndexEntry] = {}
        self._published_by_path: dict[Address, IndexEntry] = {}
        self._touched: dict[IndexEntry, None] = {}
        """Entries that changed since the last ``settle``, in order."""
        self._unknown: list[IndexEntry] = []

    # What the root has

    def listed(self, shard: int, addresses: Iterable[Address]) -> None:
        """Notes a whole listing of a shard. Nothing there is condemned any more."""
        there = set(addresses)
        for entry in self._shards.get(shard, {}).values():
            if entry.is_present and entry.address not in there:
                entry.is_present = False
                self._touched[entry] = None
            if entry.is_condemned:
                entry.is_condemned = False
                self._touched[entry] = None
        for address in there:
            entry = self._entry(address)
            if not entry.is_present:
                entry.is_present = True
                self._unknown.append(entry)
                self._touched[entry] = None

    def condemn(self, entries: Iterable[IndexEntry]) -> None:
        """Notes that these count as misses from now on (rule H1), until they are listed again."""
        for entry in entries:
            entry.is_condemned = True
            self._touched[entry] = None

    def unknown(self) -> list[IndexEntry]:
        """Returns entries whose files have to be read; each is returned once."""
        unknown, self._unknown = self._unknown, []
        return [each for each in unknown if each.is_present and each.block is None]

    def learn(self, entry: IndexEntry, block: EventBlock) -> None:
        """Notes what a file says. It holds for as long as the file is there."""
        if not entry.is_present or entry.block is not None:
            return
        entry.block = block
        if block.depth:
            entry.parent = self._entry(block.parent)
            entry.parent.children.add(entry)
        self._touched[entry] = None

    def present(self, shard: int | None = None) -> list[IndexEntry]:
        """Returns the entries that are there, of one shard or of all."""
        shards = self._shards.values() if shard is None else [self._shards.get(shard, {})]
        return [entry for each in shards for entry in each.values() if entry.is_present]

    # Publication

    def settle(self) -> Difference:
        """Returns the difference to what was published before, and counts it as published from now on."""
        touched, self._touched = self._touched, {}
        found = Difference([], [])
        for entry in touched:
            if not entry.is_readable:
                self._unpublish(entry, found.removed)
        for entry in touched:
            self._publish(entry, found.stored)
        for entry in touched:
            if not entry.is_present:
                self._forget(entry)
        return found

    def snapshot(self) -> list[EventBlock]:
        """Returns all published blocks, parents first."""
        found: list[EventBlock] = []
        waiting = [each for each in self.present() if each.is_published and each.parent is None]
        while waiting:
            entry = waiting.pop()
            if entry.is_published and entry.block is not None:
                found.append(entry.block)
                waiting += entry.children
        return found

    def has_hash(self, number: int) -> bool:
        """True if a block with this name in events is published."""
        return number in self._published_by_hash

    def has_path(self, path: Address) -> bool:
        """True if a chunk, or a block with the same tokens, is published behind the prefix that this address names.

        Of several blocks with one path, the one published last decides.
        """
        return path in self._published_by_path

    def _entry(self, address: Address) -> IndexEntry:
        shard = self._shards.setdefault(places.shard(address, self._shard_bits), {})
        found = shard.get(address)
        if found is None:
            found = shard[address] = IndexEntry(address)
        return found

    def _publish(self, entry: IndexEntry, stored: list[EventBlock]) -> None:
        """Publishes an entry and all below it, as far as they can be read."""
        waiting = [entry]
        while waiting:
            each = waiting.pop()
            block = each.block
            if block is None or each.is_published or not each.is_readable or not each.is_next:
                continue
            each.is_published = True
            each.path = self._path(each, block)
            self._published_by_hash.setdefault(block.hash, each)
            if each.path is not None:
                self._published_by_path[each.path] = each
            stored.append(block)
            waiting += each.children

    def _unpublish(self, entry: IndexEntry, removed: list[EventBlock]) -> None:
        """Retracts an entry and all below it."""
        waiting = [entry]
        while waiting:
            each = waiting.pop()
            block = each.block
            if block is None or not each.is_published:
                continue
            each.is_published = False
            if self._published_by_hash.get(block.hash) is each:
                del self._published_by_hash[block.hash]
            if each.path is not None and self._published_by_path.get(each.path) is each:
                del self._published_by_path[each.path]
            removed.append(block)
            waiting += each.children

    def _path(self, entry: IndexEntry, block: EventBlock) -> Address | None:
        if block.group is None:
            return entry.address
        above = NO_PARENT if entry.parent is None else entry.parent.path
        if above is None or not block.is_plain:
            return None
        return chunk_address(self._digest, above, block.tokens)

    def _forget(self, entry: IndexEntry) -> None:
        """Drops what a file said that is gone: another writer may say something else when it comes again."""
        above, entry.parent, entry.block = entry.parent, None, None
        self._drop_unused(entry)
        if above is not None:
            above.children.discard(entry)
            self._drop_unused(above)

    def _drop_unused(self, entry: IndexEntry) -> None:
        if not entry.is_present and not entry.children:
            self._shards[places.shard(entry.address, self._shard_bits)].pop(entry.address, None)
