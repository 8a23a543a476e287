"""A look at a root for the explorer of prefixes: all of a small root, a fair sample of a large one.

A sample takes shards, and addresses within them. The ancestors of a sampled chunk, most of them shared, are looked up
one by one. Headers are read at a bounded pace: nodes need the root more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.address import NO_PARENT, Address
from kvstore.census.fixed import read_fixed
from kvstore.census.walk import Found, sampled, walk_shard
from kvstore.dashboard.forest import Forest, Leaf
from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.format.header import FIXED_BYTES, Kind
from kvstore.namespace import NamespaceId
from kvstore.recency import QUANTUM_S
from kvstore.recency import decode as recency_of
from kvstore.root.identity import RootIdentity
from kvstore.root.interface import Root

CHUNKS_MAX = 40_000
"""Number of chunks in a sample; about 1 KiB of memory each with their ancestors."""
ANCESTORS_MAX = 40_000
PER_S_MAX = 4_000.0
"""Headers read in a second, on average."""
EXPLORE_S_MAX = 90.0


@dataclass(slots=True)
class _Explorer:
    """One look at one root."""

    root: Root
    shard_bits: int
    pace: Callable[[], bool]
    leaves: dict[Address, Leaf] = field(default_factory=dict)
    blocks: dict[NamespaceId, tuple[float, float]] = field(default_factory=dict)
    unreadable_count: int = 0

    def take(self, found: Found, weight: float) -> None:
        """Looks at one chunk, which stands for ``weight`` of the root's chunks."""
        kind = self._look(found.address, found.namespace, weight)
        if kind is Kind.BLOCK:
            count, size_bytes = self.blocks.get(found.namespace, (0.0, 0.0))
            self.blocks[found.namespace] = (count + weight, size_bytes + weight * found.size_bytes)

    def ancestors(self) -> bool:
        """Looks at the sample's ancestors; False if there are too many, or it takes too long."""
        count = 0
        for leaf in list(self.leaves.values()):
            parent = leaf.parent
            while parent != NO_PARENT and parent not in self.leaves:
                count += 1
                if count > ANCESTORS_MAX or not self.pace():
                    return False
                self._look(parent, leaf.namespace, 0.0)
                if parent not in self.leaves:
                    break  # it is gone: what hangs on it is shown as such
                parent = self.leaves[parent].parent
        return True

    def trouble(self, error: KVStoreError) -> None:
        """Counts a file that could not be read."""
        self.unreadable_count += 1

    def _look(self, address: Address, namespace: NamespaceId, weight: float) -> Kind | None:
        try:
            seen = self.root.look(places.chunk(address, namespace, self.shard_bits), FIXED_BYTES)
        except KVStoreError as error:
            self.trouble(error)
            return None
        fixed = None if seen is None else read_fixed(seen.prefix)
        if seen is None or fixed is None or fixed.address != address:
            return None  # gone meanwhile, or damaged: its next reader finds out
        if fixed.kind is Kind.TOKENS:
            when = recency_of(seen.stat.mtime_ns, QUANTUM_S)
            size_bytes, last_use_s = seen.stat.size_bytes, int(when.last_use_s)
            self.leaves[address] = Leaf(
                address, fixed.parent, namespace, fixed.depth, size_bytes, last_use_s, when.uses, weight
            )
        return fixed.kind


def explore(root: Root, identity: RootIdentity, chunks_max: int = CHUNKS_MAX, per_s_max: float = PER_S_MAX) -> Forest:
    """Returns the forest of a root, of about ``chunks_max`` chunks and their ancestors. Errors of files are counted.

    Raises the root's errors if its folder of chunks cannot be listed.
    """
    explorer = _Explorer(root, identity.shard_bits, _paced(per_s_max))
    shards_count = 1 << identity.shard_bits
    next(iter(root.list(places.CHUNKS)), None)  # a root that does not answer must raise, not look like an empty forest
    first = list(walk_shard(root, 0, headers=False, trouble=explorer.trouble))
    share = min(1.0, chunks_max / max(1, len(first) * shards_count))
    shards = sampled(identity.shard_bits, share)
    # If a shard has more than its part of the sample, sample it by address, which is a hash.
    part = min(1.0, share * shards_count / len(shards))
    weight = shards_count / len(shards) / part
    is_whole = True
    for shard in shards:
        found = first if shard == 0 else walk_shard(root, shard, headers=False, trouble=explorer.trouble)
        for chunk in found:
            if int.from_bytes(chunk.address[-4:], "little") >= part * (1 << 32):
                continue
            if len(explorer.leaves) >= 2 * chunks_max or not explorer.pace():
                is_whole = False
                break
            explorer.take(chunk, weight)
        if not is_whole:
            break
    is_whole = explorer.ancestors() and is_whole
    return Forest(
        1 / weight, is_whole, explorer.leaves, explorer.blocks, unreadable_count=explorer.unreadable_count
    ).grown()


def _paced(per_s_max: float) -> Callable[[], bool]:
    """Returns a function to call before each file: it waits to keep the pace; False once all of it takes too long."""
    began_s = time.monotonic()
    count = 0

    def pace() -> bool:
        nonlocal count
        count += 1
        spent_s = time.monotonic() - began_s
        if count % 64 == 0 and (ahead_s := count / per_s_max - spent_s) > 0:
            time.sleep(ahead_s)
        return spent_s < EXPLORE_S_MAX

    return pace
