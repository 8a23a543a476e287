"""Reports where the chunks of a prompt lie, for people who ask: root, memory, local disk, peers.

A report is not a use: it reads only the first bytes of files, without keys, renews no
recency, sets nothing aside, and only looks at memory and peers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvstore.census.walk import Fixed, read_fixed
from kvstore.core import recency
from kvstore.core.address import Address
from kvstore.core.executor import Deadline
from kvstore.core.results import ChunkPlace, MemoryCopy, RootCopy
from kvstore.format.header import FIXED_BYTES, Encoding
from kvstore.format.keyset import ChunkKeys
from kvstore.root.interface import Stat

if TYPE_CHECKING:
    from kvstore.engine.engine import Engine

STEP = 256
"""Chunks looked at in one step."""
ENCODINGS = Encoding.COMPRESSED | Encoding.ENCRYPTED


class ChunkLocator:
    """Looks for the chunks of one node. Thread-safe."""

    def __init__(self, node: Engine) -> None:
        self._chunks = node.store
        self._lanes = node.lanes
        self._gc_view = node.gc_view
        self._tiers = node.tiers

    def places(self, chain: ChunkKeys, deadline: Deadline) -> Iterator[list[ChunkPlace]]:
        """Yields where a chain's leading chunks are, in steps, up to the first that is nowhere.

        Raises the root's errors.
        """
        for start in range(0, len(chain), STEP):
            found = self._step(chain, start, min(len(chain), start + STEP), deadline)
            count = next((at for at, each in enumerate(found) if not each.is_anywhere), len(found))
            if count:
                yield found[:count]
            if count < len(found):
                return

    def _step(self, chain: ChunkKeys, start: int, stop: int, deadline: Deadline) -> list[ChunkPlace]:
        seen: dict[int, tuple[Stat, Fixed]] = {}

        def look(number: int) -> bool:
            found = self._on_root(chain, start + number)
            if found is not None:
                seen[start + number] = found
            return True

        self._lanes.each(stop - start, look, deadline)
        memory, tiers = self._in_memory(chain, start, stop), self._tiers.below if self._tiers is not None else []
        found = []
        for index in range(start, stop):
            said = {tier.name: tier.holders(chain, index) for tier in tiers}
            found.append(
                ChunkPlace(
                    index,
                    chain.addresses[index],
                    self._root_copy(chain.addresses[index], *seen[index]) if index in seen else None,
                    memory[index - start],
                    bool(said.get("disk")),
                    said.get("peers", ()),
                )
            )
        return found

    def _on_root(self, chain: ChunkKeys, index: int) -> tuple[Stat, Fixed] | None:
        """Returns what the root and the header say of one file. The next reader finds a damaged one."""
        address, namespace = chain.addresses[index], chain.namespace
        seen = self._chunks.root.look(self._chunks.name(address, namespace.id), FIXED_BYTES)
        header = read_fixed(seen.prefix) if seen is not None else None
        if seen is None or header is None or header.namespace != namespace.digest:
            return None
        return seen.stat, header

    def _root_copy(self, address: Address, stat: Stat, header: Fixed) -> RootCopy:
        when = recency.decode(stat.mtime_ns, self._chunks.known.quantum_s)
        encoding = Encoding(header.encoding & ENCODINGS)
        return RootCopy(
            stat.size_bytes,
            int(when.last_use_s),
            when.uses,
            when.hints,
            encoding,
            header.key_id if Encoding.ENCRYPTED in encoding else b"",
            self._gc_view.condemns(address),
        )

    def _in_memory(self, chain: ChunkKeys, start: int, stop: int) -> list[MemoryCopy | None]:
        if self._tiers is None:
            return [None] * (stop - start)
        # Keep a reference while we look, so that all facts about an image belong together; that counts as one more
        # user.
        with self._tiers.memory.refer(chain, start, stop - start) as slots:
            return [
                None if each is None else MemoryCopy(each.size_bytes, each.is_dirty, each.references - 1)
                for each in slots.entries
            ]
