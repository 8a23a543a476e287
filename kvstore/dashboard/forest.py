"""The forest of prefixes: chunks and their parents, with unforked runs of chunks drawn as one. Pure.

A *run* is a chunk and those that follow it, until two continuations share a parent or the prompt ends. It stands for a
stretch of text, such as a system prompt or one turn of a chat. Tokens are never looked at: they are the prompts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvstore.address import NO_PARENT, Address
from kvstore.namespace import NamespaceId


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
class Run:
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
    """The chunks of a census. Build it with ``grown``.

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

    def grown(self) -> Forest:
        """Links and sums ``leaves``; call it once, before anything else."""
        for address, leaf in self.leaves.items():
            if leaf.parent in self.leaves and leaf.parent != address:
                self._children.setdefault(leaf.parent, []).append(address)
            else:
                self._tops.setdefault(leaf.namespace, []).append(address)
        for tops in self._tops.values():
            for top in tops:
                self._add_up(top)
        return self

    def namespaces(self) -> Mapping[NamespaceId, Sum]:
        """Returns the sums of each namespace."""
        found = {}
        for namespace, tops in self._tops.items():
            total = Sum(depth_max=0)
            for top in tops:
                _add(total, self._sums[top], 0)
            found[namespace] = total
        return found

    def runs(self, namespace: NamespaceId | None, at: Address | None, runs_max: int, order: str) -> list[Run]:
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
        found: list[Run] = []
        while heap and len(found) < runs_max:
            _, start, above = heapq.heappop(heap)
            run, ends = self._run(start, above)
            found.append(run)
            for child in ends:
                heapq.heappush(heap, (weight(self._sums[child]), child, start))
        return found

    def way_to(self, at: Address) -> list[Run]:
        """Returns the runs from the start of the prompt to before the run at ``at``; empty if it is unknown."""
        way: list[Address] = []
        address: Address | None = self._parent(at)
        while address is not None:
            way.append(address)
            address = self._parent(address)
        way.reverse()
        runs: list[Run] = []
        done = 0
        while done < len(way):
            run, _ = self._run(way[done], runs[-1].id if runs else None)
            runs.append(run)
            done += run.chunks
        return runs

    def _parent(self, address: Address) -> Address | None:
        leaf = self.leaves.get(address)
        return leaf.parent if leaf is not None and leaf.parent in self.leaves and leaf.parent != address else None

    def _run(self, start: Address, above: Address | None) -> tuple[Run, list[Address]]:
        """Returns the run from ``start`` on, and the chunks that continue it."""
        first = self.leaves[start]
        chunks, size_bytes, last_use_s, uses = 1, first.size_bytes, first.last_use_s, first.uses
        at = start
        while len(after := self._children.get(at, [])) == 1:
            at = after[0]
            leaf = self.leaves[at]
            chunks, size_bytes = chunks + 1, size_bytes + leaf.size_bytes
            last_use_s, uses = max(last_use_s, leaf.last_use_s), max(uses, leaf.uses)
        run = Run(
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
