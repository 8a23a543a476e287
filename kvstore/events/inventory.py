"""The chunks and engine-hashed blocks of one namespace, as the root has them and as they were last published.

Events are the differences between both. A block is published if its file exists, no sweep or clear condemns it, its
identity is known, and the same holds of its parent: what a ``get`` would read, and nothing else (EVENTS.md, section 2).
Pure: no I/O beyond a file for tokens, no clock.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from kvstore.core.address import NO_PARENT, Address, block_address, chunk_address
from kvstore.core.namespace import Namespace, NamespaceId
from kvstore.core.validate import why
from kvstore.errors import InvalidRequest
from kvstore.format import places
from kvstore.format.header import NO_WHOLE

DEAD_MIN = 65_536
"""So many blocks that are gone are kept at least before they are dropped, all together."""
WHOLES_MAX = 16
"""Limit on different wholes that the blocks of one namespace are parts of; blocks of further ones are not published.
Each costs a check of every block that changes, and writers can make up any number."""


@dataclass(frozen=True, slots=True)
class EventOrigin:
    """The fields that the blocks of one event share."""

    group: int
    lora_name: str | None = None
    parts: int = 1
    """Namespaces that must all have the block for it to be of use."""
    whole: bytes = NO_WHOLE
    """The name that these namespaces share."""


@dataclass(frozen=True, slots=True)
class BlockName:
    """One block as its engine names it."""

    key: bytes
    hash_bytes: int
    """Leading bytes of the key that are the engine's hash."""
    origin: EventOrigin
    extra_keys: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """The identity in a file: of a chunk, or with a name of an engine-hashed block."""

    parent: Address
    """NO_PARENT for the first block of a prompt."""
    tokens: bytes
    """Token ids, as little-endian u32."""
    name: BlockName | None = None


@dataclass(slots=True, eq=False)
class IndexedBlock:
    """A chunk or an engine-hashed block."""

    address: Address
    parent: IndexedBlock | None = None
    name: BlockName | None = None
    line: int | None = None
    """Where its tokens are; None until its identity is known."""
    path: bytes = b""
    """The address of a chunk with the same tokens after the same prefix, while a named block is published: a prompt is
    hashed once for chunks and blocks. Empty if tokens alone do not lead to the block (adapters, extra keys)."""
    depth: int = 0
    children_count: int = 0
    """Published children."""
    is_present: bool = False
    is_condemned: bool = False
    is_refused: bool = False
    """The file does not match its name, so it is never published."""
    lacks_part: bool = False
    """Another part of the block is missing, or another namespace publishes it."""
    is_published: bool = False

    @property
    def is_readable(self) -> bool:
        """True if its file can be read, whatever its parent and its other parts are."""
        return self.is_present and self.line is not None and not self.is_condemned

    @property
    def event_hash(self) -> int:
        """The name in events: the low 64 bits of a chunk's address, or of an engine's hash, as in vLLM."""
        named = self.address if self.name is None else self.name.key[: self.name.hash_bytes]
        return int.from_bytes(named[-8:], "big")


@dataclass(frozen=True, slots=True)
class Difference:
    """Blocks to publish: first those no longer there, then those that are, parents first."""

    removed: list[IndexedBlock]
    stored: list[IndexedBlock]


class TokenFile:
    """Lines of tokens in a file without a name: memory that the kernel may take back."""

    def __init__(self, width: int, folder: str | None) -> None:
        """``width`` is in tokens."""
        self.width = width
        self._bytes = 4 * width
        self._count = 0
        self._free: list[int] = []
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix="kvstore-events-")  # noqa: SIM115 - see close
        except OSError as cause:
            raise InvalidRequest(f"no file can be made in {folder or tempfile.gettempdir()!r}: {why(cause)}") from cause

    def add(self, tokens: bytes) -> int:
        """Writes one line; returns its number."""
        if self._free:
            line = self._free.pop()
        else:
            line, self._count = self._count, self._count + 1
        os.pwrite(self._file.fileno(), tokens, line * self._bytes)
        return line

    def read(self, line: int | None) -> bytes:
        """Returns a line."""
        assert line is not None
        return os.pread(self._file.fileno(), self._bytes, line * self._bytes)

    def free(self, lines: Iterable[int]) -> None:
        """Has lines be written again."""
        self._free += lines

    def close(self) -> None:
        """Gives the file back."""
        self._file.close()


class NamespaceIndex:
    """One namespace. Used by one thread, or under its owner's lock."""

    def __init__(self, namespace: Namespace, shard_bits: int, folder: str | None = None) -> None:
        """``folder`` is where the file for tokens goes, without a name; None: where temporary files go."""
        self.namespace = namespace
        self.tokens = TokenFile(namespace.layout.chunk_tokens, folder)
        self.by_hash: dict[int, IndexedBlock] = {}
        """Published blocks by their names in events."""
        self.by_path: dict[bytes, IndexedBlock] = {}
        """Published engine-hashed blocks by their paths; of several with one path, the last."""
        self.wholes: dict[bytes, int] = {}
        """The wholes that blocks here are parts of, with their number of parts; without blocks that are whole."""
        self._shard_bits = shard_bits
        self._shards: dict[int, dict[Address, IndexedBlock]] = {}
        self._count = self._present_count = 0
        self._origins: dict[EventOrigin, EventOrigin] = {}
        self._touched: dict[IndexedBlock, None] = {}
        self._unread: dict[IndexedBlock, None] = {}
        self._retried: list[IndexedBlock] = []
        self._freed: list[int] = []
        self._waiting: dict[IndexedBlock, list[IndexedBlock]] = {}
        """Blocks that could be published, by the parent that is not."""

    @property
    def has_unread(self) -> bool:
        """True if there are blocks whose files are still to be read."""
        return bool(self._unread)

    def find(self, address: Address) -> IndexedBlock | None:
        """Returns the block at an address, whether its file exists or not; None if it is unknown."""
        return self._shard(places.shard(address, self._shard_bits)).get(address)

    def has_published(self, address: Address) -> bool:
        """True if the block at an address is published."""
        block = self.find(address)
        return block is not None and block.is_published

    def blocks(self) -> Iterator[IndexedBlock]:
        """Yields all known blocks."""
        return (block for shard in self._shards.values() for block in shard.values())

    # What the root has

    def listed(self, shard: int, addresses: Set[Address]) -> None:
        """Notes a whole listing of a shard. Nothing there is condemned any more."""
        for block in self._shard(shard).values():
            if block.is_condemned:
                block.is_condemned = False
                self._touched[block] = None
            if block.is_present and block.address not in addresses:
                self._leave(block)
        for address in addresses:
            self.arrived(address)

    def arrived(self, address: Address) -> None:
        """Notes a block that is there."""
        block = self._ensure(address)
        if not block.is_present:
            block.is_present = True
            self._present_count += 1
            self._touched[block] = None
            if block.line is None:
                self._unread[block] = None

    def left(self, address: Address) -> None:
        """Notes a block that is not there any more."""
        block = self.find(address)
        if block is not None and block.is_present:
            self._leave(block)

    def present(self, shard: int) -> list[IndexedBlock]:
        """Returns the blocks of a shard that are there."""
        return [block for block in self._shard(shard).values() if block.is_present]

    def condemn(self, blocks: Iterable[IndexedBlock]) -> None:
        """Notes that these count as misses from now on (rule H1), until they are listed again."""
        for block in blocks:
            block.is_condemned = True
            self._touched[block] = None

    def unread(self, count_max: int) -> list[IndexedBlock]:
        """Returns blocks that are there and whose identity has to be learnt; each is returned once."""
        found: list[IndexedBlock] = []
        self._unread |= dict.fromkeys(self._retried)
        self._retried = []
        while self._unread and len(found) < count_max:
            block = next(iter(self._unread))
            del self._unread[block]
            if block.is_present and block.line is None and not block.is_refused:
                found.append(block)
        return found

    def retry(self, block: IndexedBlock) -> None:
        """Has the next ``unread`` return a block again."""
        self._retried.append(block)

    def refuse(self, block: IndexedBlock) -> None:
        """Notes that the file of a block does not match its name."""
        block.is_refused = True

    def learn(self, block: IndexedBlock, identity: BlockIdentity) -> None:
        """Notes an identity. That of a chunk holds for ever, because its address follows from it."""
        name = identity.name
        if name is not None and name.origin.parts > 1:
            if name.origin.whole not in self.wholes and len(self.wholes) >= WHOLES_MAX:
                self.refuse(block)
                return
            self.wholes[name.origin.whole] = name.origin.parts
        if name is not None:
            origin = self._origins.setdefault(name.origin, name.origin)  # one object for all, to save memory
            name = BlockName(name.key, name.hash_bytes, origin, name.extra_keys)
        block.name, block.lacks_part = name, name is not None and name.origin.parts > 1
        block.line = self.tokens.add(identity.tokens)
        block.parent = None if identity.parent == NO_PARENT else self._ensure(identity.parent)
        self._touched[block] = None

    def part_keys(self, whole: bytes, *, all_blocks: bool) -> list[bytes]:
        """Returns the keys of blocks that are parts of a whole: of all, or of those touched since ``settle``."""
        blocks = self.blocks() if all_blocks else self._touched
        return [block.name.key for block in blocks if block.name is not None and block.name.origin.whole == whole]

    def lack(self, block: IndexedBlock, *, lacks_part: bool) -> None:
        """Notes whether a block lacks another part."""
        if block.lacks_part != lacks_part:
            block.lacks_part = lacks_part
            self._touched[block] = None

    # Publication

    def settle(self) -> Difference:
        """Returns the difference to what was published before, and counts it as published from now on."""
        touched, self._touched = self._touched, {}
        removed = [block for block in touched if block.is_published and not _may_be_published(block)]
        for block in removed:
            self._unpublish(block)
        cut_off = self._cut_off() if any(block.children_count for block in removed) else []
        stored, candidates = list[IndexedBlock](), [*touched, *cut_off]
        while candidates:
            block = candidates.pop()
            if block.is_published or not _may_be_published(block):
                continue
            if block.parent is not None and not block.parent.is_published:
                self._waiting.setdefault(block.parent, []).append(block)
                continue
            self._publish(block)
            stored.append(block)
            candidates += self._waiting.pop(block, ())
        for block in touched:
            if block.name is not None and not block.is_present:
                self._forget(block)  # another writer may claim something else of it when it comes again
        return Difference([*removed, *cut_off], stored)

    def snapshot(self) -> list[IndexedBlock]:
        """Returns all published blocks, parents first."""
        return sorted((block for block in self.blocks() if block.is_published), key=lambda block: block.depth)

    def compact(self, dead_min: int = DEAD_MIN) -> None:
        """Drops blocks that are gone, if they are many. Call it while no difference and no snapshot is in use."""
        self.tokens.free(self._freed)
        self._freed = []
        if self._count - self._present_count < max(dead_min, self._count // 2):
            return
        parents = {block.parent for block in self.blocks() if block.is_present}
        for shard in self._shards.values():
            for block in [block for block in shard.values() if not block.is_present]:
                # A parent that is gone stays as an address alone.
                self._forget(block)
                if block not in parents:
                    del shard[block.address]
                    self._count -= 1
        self._waiting = {}
        self._touched |= dict.fromkeys(block for block in self.blocks() if not block.is_published)

    def close(self) -> None:
        """Gives the file back."""
        self.tokens.close()

    def _shard(self, number: int) -> dict[Address, IndexedBlock]:
        """Returns the blocks of a shard, to read."""
        return self._shards.get(number) or {}

    def _ensure(self, address: Address) -> IndexedBlock:
        shard = self._shards.setdefault(places.shard(address, self._shard_bits), {})
        block = shard.get(address)
        if block is None:
            block = shard[address] = IndexedBlock(address)
            self._count += 1
        return block

    def _leave(self, block: IndexedBlock) -> None:
        block.is_present = block.is_refused = False
        self._present_count -= 1
        self._touched[block] = None

    def _forget(self, block: IndexedBlock) -> None:
        if block.line is not None:
            self._freed.append(block.line)
        block.line = block.parent = None  # the name stays for the event of its removal

    def _publish(self, block: IndexedBlock) -> None:
        block.is_published = True
        if block.parent is not None:
            block.parent.children_count += 1
            block.depth = block.parent.depth + 1
        else:
            block.depth = 0
        self.by_hash[block.event_hash] = block
        if block.name is not None and (path := self._path_of(block, block.name)):
            block.path = path
            self.by_path[path] = block

    def _path_of(self, block: IndexedBlock, name: BlockName) -> bytes:
        above = NO_PARENT if block.parent is None else block.parent.path
        if not above or name.origin.lora_name is not None or name.extra_keys is not None:
            return b""  # engines mix adapters and extra keys into the hash of a block and of all that follow
        return chunk_address(self.namespace.digest, Address(above), self.tokens.read(block.line))

    def _unpublish(self, block: IndexedBlock) -> None:
        block.is_published = False
        if block.parent is not None:
            block.parent.children_count -= 1
        if self.by_hash.get(block.event_hash) is block:
            del self.by_hash[block.event_hash]
        if self.by_path.get(block.path) is block:
            del self.by_path[block.path]
        block.path = b""

    def _cut_off(self) -> list[IndexedBlock]:
        """Unpublishes all blocks below unpublished ones. Checks every block; rare: leaves are evicted first."""
        children: defaultdict[IndexedBlock, list[IndexedBlock]] = defaultdict(list)
        for block in self.blocks():
            if block.is_published and block.parent is not None:
                children[block.parent].append(block)
        lost = [child for parent, below in children.items() if not parent.is_published for child in below]
        for block in lost:
            self._unpublish(block)
            lost += children[block]
        return lost


def _may_be_published(block: IndexedBlock) -> bool:
    return block.is_readable and not block.lacks_part


# Blocks in several parts: each rank of an engine stores its own under one key, in a namespace of its own.
#
# Such a block can be loaded only with all of its parts. So the namespace with the lowest id publishes it, while all
# of them have it. If more namespaces claim to be parts than there are, none publishes it.


class MultipartBlocks:
    """Decides which parts are published, before indexes settle. Used under the lock of their owner."""

    def __init__(self) -> None:
        self._members: dict[tuple[str, str, bytes], set[NamespaceId]] = {}
        """By tenant and name of the namespaces, and the whole that their blocks are parts of."""

    def judge(self, indexes: Iterable[NamespaceIndex]) -> None:
        """Notes for each block that changed whether its namespace publishes it, as far as other parts matter."""
        groups: defaultdict[tuple[str, str, bytes], list[NamespaceIndex]] = defaultdict(list)
        for index in sorted(indexes, key=lambda index: index.namespace.id):
            for whole in index.wholes:
                groups[index.namespace.tenant, index.namespace.name, whole].append(index)
        for known, indexes_of_whole in groups.items():
            members = {index.namespace.id for index in indexes_of_whole}
            is_new = self._members.get(known) != members
            self._members[known] = members
            _judge(known[2], indexes_of_whole, is_new=is_new)


def _judge(whole: bytes, members: Sequence[NamespaceIndex], *, is_new: bool) -> None:
    """Judges the blocks of one whole that something happened to; all of them if its members are others than before."""
    is_complete = {index.wholes[whole] for index in members} == {len(members)}
    for key in dict.fromkeys(key for index in members for key in index.part_keys(whole, all_blocks=is_new)):
        parts = [(index, index.find(block_address(index.namespace, key))) for index in members]
        is_whole = is_complete and all(block is not None and block.is_readable for _, block in parts)
        for index, block in parts:
            if block is not None:
                index.lack(block, lacks_part=not is_whole or index is not members[0])
