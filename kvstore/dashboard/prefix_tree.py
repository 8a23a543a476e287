"""The tree of stored prefixes, and how a user explores it."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvstore.census.walk import ChunkFile, read_fixed, walk_shard
from kvstore.core.address import NO_PARENT, Address
from kvstore.core.namespace import NamespaceId
from kvstore.core.recency import QUANTUM_S
from kvstore.core.recency import decode as recency_of
from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.format.header import FIXED_BYTES, IdentityKind
from kvstore.root.identity import RootIdentity
from kvstore.root.interface import Root

# The forest of prefixes: chunks and their parents, with unforked runs of chunks drawn as one. Pure.
#
# A *run* is a chunk and those that follow it, until two continuations share a parent or the prompt ends. It stands
# for a stretch of text, such as a system prompt or one turn of a chat. Tokens are never looked at: they are the
# prompts.


@dataclass(frozen=True, slots=True)
class Leaf:
    """One chunk as found. ``weight`` is how many chunks of the root it stands for; 0 for a mere ancestor."""

    address: Address
    parent: Address
    namespace: NamespaceId
    depth: int
    """Its index in its prompt."""
    size_bytes: int
    last_use_s: int
    uses: int
    weight: float = 1.0


@dataclass(slots=True)
class Sum:
    """The sums over a chunk and all chunks that follow it."""

    chunks: float = 0.0
    size_bytes: float = 0.0
    depth_max: int = 1
    """Number of chunks from this one to the end of the longest prompt."""
    ends_count: int = 0
    """Number of prompts that end at or below it."""
    last_use_s: int = 0
    uses: int = 0


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A run, by its first chunk. ``above`` is the run that it continues; None for the first of a prompt."""

    id: Address
    above: Address | None
    namespace: NamespaceId
    first: int
    """Index of its first chunk in the prompt."""
    chunks: int
    size_bytes: int
    below: Sum
    """Sums including all runs that continue it."""
    forks: int
    """Number of runs that continue it."""
    last_use_s: int
    uses: int
    is_rooted: bool
    """True if it begins a prompt or its parent is on the root; else no match reaches it."""


@dataclass(slots=True)
class Forest:
    """The chunks of a census, linked and summed.

    ``share`` is the part of the root that was looked at; ``is_whole`` says whether that was all that was wanted.
    """

    share: float
    is_whole: bool
    leaves: dict[Address, Leaf]
    blocks: dict[NamespaceId, tuple[float, float]] = field(default_factory=dict)
    """Engine-hashed blocks, which have no parents: their approximate number and bytes."""
    unreadable_count: int = 0
    _children: dict[Address, list[Address]] = field(default_factory=dict)
    _sums: dict[Address, Sum] = field(default_factory=dict)
    _tops: dict[NamespaceId, list[Address]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for address, leaf in self.leaves.items():
            if leaf.parent in self.leaves and leaf.parent != address:
                self._children.setdefault(leaf.parent, []).append(address)
            else:
                self._tops.setdefault(leaf.namespace, []).append(address)
        for tops in self._tops.values():
            for top in tops:
                self._add_up(top)

    def namespaces(self) -> Mapping[NamespaceId, Sum]:
        """Returns the sums of each namespace."""
        found = {}
        for namespace, tops in self._tops.items():
            total = Sum(depth_max=0)
            for top in tops:
                _add(total, self._sums[top], 0)
            found[namespace] = total
        return found

    def runs(self, namespace: NamespaceId | None, at: Address | None, runs_max: int, order: str) -> list[PrefixNode]:
        """Returns the ``runs_max`` heaviest runs, parents before children, of a namespace (None: of all).

        With ``at``, returns the run at that address and its continuations. ``order`` is the measure: "bytes" including
        all continuations, "recent", or "long".
        """
        if at is not None:
            starts = [at] if at in self.leaves else []
        else:
            wanted = self._tops if namespace is None else {namespace: self._tops.get(namespace, [])}
            starts = [top for tops in wanted.values() for top in tops]
        weight = _WEIGHTS[order]
        heap: list[tuple[tuple[float, ...], Address, Address | None]] = [
            (weight(self._sums[start]), start, None) for start in starts
        ]
        heapq.heapify(heap)
        found: list[PrefixNode] = []
        while heap and len(found) < runs_max:
            _, start, above = heapq.heappop(heap)
            run, ends = self._run(start, above)
            found.append(run)
            for child in ends:
                heapq.heappush(heap, (weight(self._sums[child]), child, start))
        return found

    def way_to(self, at: Address) -> list[PrefixNode]:
        """Returns the runs from the start of the prompt to before the run at ``at``; empty if it is unknown."""
        way: list[Address] = []
        address: Address | None = self._parent(at)
        while address is not None:
            way.append(address)
            address = self._parent(address)
        way.reverse()
        runs: list[PrefixNode] = []
        done = 0
        while done < len(way):
            run, _ = self._run(way[done], runs[-1].id if runs else None)
            runs.append(run)
            done += run.chunks
        return runs

    def _parent(self, address: Address) -> Address | None:
        leaf = self.leaves.get(address)
        return leaf.parent if leaf is not None and leaf.parent in self.leaves and leaf.parent != address else None

    def _run(self, start: Address, above: Address | None) -> tuple[PrefixNode, list[Address]]:
        """Returns the run from ``start`` on, and the chunks that continue it."""
        first = self.leaves[start]
        chunks, size_bytes, last_use_s, uses = 1, first.size_bytes, first.last_use_s, first.uses
        at = start
        while len(after := self._children.get(at, [])) == 1:
            at = after[0]
            leaf = self.leaves[at]
            chunks, size_bytes = chunks + 1, size_bytes + leaf.size_bytes
            last_use_s, uses = max(last_use_s, leaf.last_use_s), max(uses, leaf.uses)
        run = PrefixNode(
            id=start,
            above=above,
            namespace=first.namespace,
            first=first.depth,
            chunks=chunks,
            size_bytes=size_bytes,
            below=self._sums[start],
            forks=len(after),
            last_use_s=last_use_s,
            uses=uses,
            is_rooted=first.parent == NO_PARENT or first.parent in self.leaves,
        )
        return run, list(after)

    def _add_up(self, top: Address) -> None:
        """Sums all chunks under ``top``; without recursion, since chains are thousands of chunks long."""
        order = [top]
        for address in order:
            order.extend(self._children.get(address, ()))
        for address in reversed(order):
            leaf = self.leaves[address]
            children = self._children.get(address, ())
            total = Sum(leaf.weight, leaf.weight * leaf.size_bytes, 1, 0 if children else 1, leaf.last_use_s, leaf.uses)
            for child in children:
                _add(total, self._sums[child], 1)
            self._sums[address] = total


_WEIGHTS: dict[str, Callable[[Sum], tuple[float, ...]]] = {
    "bytes": lambda each: (-each.size_bytes,),
    "recent": lambda each: (-each.last_use_s, -each.uses, -each.size_bytes),
    "long": lambda each: (-each.depth_max, -each.size_bytes),
}
"""The sort key: the heaviest run has the lowest, because a heap yields its smallest first."""
ORDERS = tuple(_WEIGHTS)


def _add(total: Sum, part: Sum, deeper: int) -> None:
    total.chunks += part.chunks
    total.size_bytes += part.size_bytes
    total.depth_max = max(total.depth_max, part.depth_max + deeper)
    total.ends_count += part.ends_count
    total.last_use_s = max(total.last_use_s, part.last_use_s)
    total.uses = max(total.uses, part.uses)


# A look at a root for the explorer of prefixes: all of a small root, a fair sample of a large one.
#
# A sample takes shards, and addresses within them. The ancestors of a sampled chunk, most of them shared, are looked
# up one by one. Headers are read at a bounded pace: nodes need the root more.


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

    def take(self, found: ChunkFile, weight: float) -> None:
        """Looks at one chunk, which stands for ``weight`` of the root's chunks."""
        kind = self._look(found.address, found.namespace, weight)
        if kind is IdentityKind.BLOCK:
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

    def _look(self, address: Address, namespace: NamespaceId, weight: float) -> IdentityKind | None:
        try:
            seen = self.root.look(places.chunk(address, namespace, self.shard_bits), FIXED_BYTES)
        except KVStoreError as error:
            self.trouble(error)
            return None
        fixed = None if seen is None else read_fixed(seen.prefix)
        if seen is None or fixed is None or fixed.address != address:
            return None  # deleted by now, or corrupt: its next reader finds out
        if fixed.kind is IdentityKind.TOKENS:
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
    first = list(walk_shard(root, 0, trouble=explorer.trouble))
    share = min(1.0, chunks_max / max(1, len(first) * shards_count))
    wanted = max(1, round(shards_count * share))
    shards = [number * shards_count // wanted for number in range(wanted)]
    # If a shard has more than its part of the sample, sample it by address, which is a hash.
    part = min(1.0, share * shards_count / len(shards))
    weight = shards_count / len(shards) / part
    is_whole = True
    for shard in shards:
        found = first if shard == 0 else walk_shard(root, shard, trouble=explorer.trouble)
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
    return Forest(1 / weight, is_whole, explorer.leaves, explorer.blocks, explorer.unreadable_count)


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
