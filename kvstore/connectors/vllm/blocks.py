"""The blocks of a request: the KV groups they belong to, their keys, and which ones to look up, load and store."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore.connectors.vllm.adapters import AdapterSnapshot
from kvstore.core.recency import DEFAULT, Hints

WINDOWS_APART = 4
"""Windows are stored whole once in this many windows of a prompt. With five window layers to one that sees everything,
that is 0.25 of their bytes, 37.5 % of all. A prompt that parts from all others between two of them loses less than
this many windows of a hit, once: the next one finds what was stored there for it."""
SPAN_UNITS = 256
"""Boundaries whose blocks are asked for in one call to the store."""


@enum.unique
class GroupKind(enum.Enum):
    """How a group's state depends on the tokens before it."""

    FULL = "attention to all tokens"
    WINDOW = "attention to the last tokens"
    CHUNK = "attention to the tokens since the last multiple of a length"
    STATE = "recurrent: one state for all tokens before it"


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Groups of one kind and block size, whose blocks for the same tokens lie in one file."""

    groups: tuple[int, ...]
    """vLLM's numbers of its groups. The first is in the keys."""
    block_tokens: int
    kind: GroupKind = GroupKind.FULL
    reach_tokens: int = 0
    """Tokens that a window sees, or the length of a chunk."""

    def first_block(self, boundary: int) -> int:
        """Returns the index of the first block that a hit of ``boundary`` tokens needs; vLLM allocates none before."""
        skipped = 0
        if self.kind is GroupKind.WINDOW:
            skipped = max(0, boundary - self.reach_tokens + 1)
        elif self.kind is GroupKind.CHUNK:
            skipped = boundary // self.reach_tokens * self.reach_tokens
        elif self.kind is GroupKind.STATE:
            skipped = max(0, boundary - 1)
        return skipped // self.block_tokens


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The boundaries at which an engine stores the blocks of windows."""

    unit: int
    apart: int
    """Tokens between two of them in a prompt."""

    @classmethod
    def of(cls, unit: int, clusters: Sequence[LayerGroups]) -> Boundaries:
        """Returns the boundaries of a model. They are everywhere where only some can be hit: between states."""
        reach = max((each.reach_tokens for each in clusters if each.kind is GroupKind.WINDOW), default=0)
        if not reach or any(each.kind is GroupKind.STATE for each in clusters):
            return cls(unit, unit)
        return cls(unit, -(-WINDOWS_APART * reach // unit) * unit)

    def next(self, tokens: int, prompt_tokens: int, parting: int) -> int:
        """Returns the first one at or behind ``tokens``: in a prompt at steps, where it parts from what was stored,
        and at its end; in what is generated everywhere, since the next turn may begin with any of it.
        """
        end = prompt_tokens // self.unit * self.unit
        step = self.apart if tokens <= end else self.unit
        ends = (parting, (prompt_tokens - 1) // self.unit * self.unit, end)
        return min([-(-tokens // step) * step, *(each for each in ends if each >= tokens)])

    def needs(self, cluster: LayerGroups, index: int, prompt_tokens: int, parting: int) -> bool:
        """True if a later hit may need this block of the cluster."""
        if cluster.kind is not GroupKind.WINDOW:
            return True
        boundary = self.next((index + 1) * cluster.block_tokens, prompt_tokens, parting)
        return cluster.first_block(boundary) <= index


@dataclass(frozen=True, slots=True)
class Tail:
    """The keys of a cluster's blocks, from a prompt's first one on. None: not to be asked for."""

    cluster: LayerGroups
    keys: Sequence[bytes | None]


Present = Callable[[Sequence[bytes]], Sequence[bool]]


def last_boundary(tails: Sequence[Tail], unit: int, low: int, high: int, present: Present) -> int:
    """Returns the last boundary above ``low`` and up to ``high``, in units, before which all tails are whole.

    Returns ``low`` if there is none. Blocks that end at or before ``low`` are the engine's own.
    """
    known: list[dict[int, bool]] = [{} for _ in tails]
    for top in range(high, low, -SPAN_UNITS):
        bottom = max(top - SPAN_UNITS, low)
        asked = []
        for number, tail in enumerate(tails):
            size = tail.cluster.block_tokens
            first = max(tail.cluster.first_block((bottom + 1) * unit), low * unit // size)
            wanted = [index for index in range(first, top * unit // size) if index not in known[number]]
            known[number].update(dict.fromkeys(wanted, False))
            asked += [(number, index, key) for index in wanted if (key := tail.keys[index]) is not None]
        hits = present([key for _, _, key in asked]) if asked else ()
        for (number, index, _), hit in zip(asked, hits, strict=True):
            known[number][index] = hit
        for boundary in range(top, bottom, -1):
            if all(_is_whole(tail, known[number], boundary * unit, low * unit) for number, tail in enumerate(tails)):
                return boundary
    return low


def _is_whole(tail: Tail, known: dict[int, bool], boundary: int, low: int) -> bool:
    size = tail.cluster.block_tokens
    first = max(tail.cluster.first_block(boundary), low // size)
    return all(known[index] for index in range(first, boundary // size))


# A request's blocks by key: which ones to look up, to load and to store, from its hashes and its block tables.


State = tuple[int, int, int]
"""The group, the block and the tokens of a recurrent state, as vLLM hands it over."""


@dataclass(frozen=True, slots=True)
class BlockHashes:
    """The source of the keys of a request's blocks: vLLM's hashes of its tokens, and an ending for all."""

    hashes: Sequence[bytes]
    ending: bytes


@dataclass(frozen=True, slots=True)
class ReuseBoundaries:
    """The boundaries of a request, in tokens. They decide which of its blocks later hits may need."""

    prompt_tokens: int
    parting: int
    """Tokens that the prompt shares with a stored one, if a hit could not have all of them: others may share them."""
    is_parting: bool
    """True if blocks before ``parting`` that the engine has itself are to be stored, too."""


class Runs:
    """Cuts requests into blocks. ``hash_tokens`` is how many tokens vLLM hashes at a time."""

    def __init__(self, clusters: Sequence[LayerGroups], hash_tokens: int) -> None:
        self.clusters = clusters
        self.hash_tokens = hash_tokens
        self.unit = math.lcm(*(each.block_tokens for each in clusters))
        """The least number of tokens that is whole blocks in every cluster."""
        self._boundaries = Boundaries.of(self.unit, clusters)

    def known_tokens(self, named: BlockHashes) -> int:
        """Returns the tokens that have keys."""
        return len(named.hashes) * self.hash_tokens

    def keys(self, named: BlockHashes, number: int, first: int, end: int) -> list[bytes]:
        """Returns the keys of a cluster's full blocks that begin in ``[first, end)`` tokens."""
        cluster = self.clusters[number]
        size, per_block = cluster.block_tokens, cluster.block_tokens // self.hash_tokens
        indices = range(first // size, min(end // size, len(named.hashes) // per_block))
        return [
            block_key(named.hashes[(index + 1) * per_block - 1], cluster.groups[0], named.ending) for index in indices
        ]

    def loads(self, named: BlockHashes, tables: Sequence[Sequence[int]], first: int, end: int) -> list[BlockRange]:
        """Returns the blocks that a hit of ``end`` tokens needs, without those before ``first``."""
        runs = []
        for number, cluster in enumerate(self.clusters):

            def needs(index: int, least: int = cluster.first_block(end)) -> bool:
                return index >= least

            runs += self._cut(named, number, tables, (first, end), needs)
        return runs

    def stores(
        self, named: BlockHashes, tables: Sequence[Sequence[int]], first: int, end: int, ends: ReuseBoundaries
    ) -> list[BlockRange]:
        """Returns the blocks in ``[first, end)`` tokens that later hits may need, without states."""
        runs = []
        for number, cluster in enumerate(self.clusters):
            begin = first
            if ends.is_parting and cluster.kind is GroupKind.WINDOW:
                begin = min(first, cluster.first_block(ends.parting) * cluster.block_tokens)

            def needs(index: int, cluster: LayerGroups = cluster) -> bool:
                return self._boundaries.needs(cluster, index, ends.prompt_tokens, ends.parting)

            if cluster.kind is not GroupKind.STATE:
                runs += self._cut(named, number, tables, (begin, end), needs)
        return runs

    def states(self, named: BlockHashes, offered: Sequence[State], begin: int, end: int) -> list[BlockRange]:
        """Returns the states at boundaries behind ``begin`` tokens and up to ``end`` that vLLM offers in a step.

        It offers the state behind a token that was being sampled one step later. Which blocks they are in only vLLM
        knows: their places in the tables change.
        """
        runs = []
        for number, cluster in enumerate(self.clusters):
            found = {(tokens, group): block for group, block, tokens in offered if group in cluster.groups}
            for boundary in sorted({tokens for tokens, _ in found}):
                blocks = tuple(found.get((boundary, group), 0) for group in cluster.groups)
                # It offers what was loaded, too, and what ends within a block.
                if all(blocks) and begin < boundary <= end and boundary % cluster.block_tokens == 0:
                    first = boundary - cluster.block_tokens
                    keys = self.keys(named, number, first, boundary)
                    runs.append(BlockRange(number, keys, [blocks], first // cluster.block_tokens))
        return runs

    def _cut(
        self,
        named: BlockHashes,
        number: int,
        tables: Sequence[Sequence[int]],
        between: tuple[int, int],
        needs: Callable[[int], bool],
    ) -> list[BlockRange]:
        """Returns a cluster's full blocks between two tokens that are needed and exist, in runs without gaps.

        ``tables`` are the request's blocks of each group; block 0 is one outside the window.
        """
        cluster, runs = self.clusters[number], list[BlockRange]()
        mine = list(zip(*(tables[group] for group in cluster.groups), strict=False))
        start = between[0] // cluster.block_tokens
        keys = self.keys(named, number, *between)
        for index, (key, blocks) in enumerate(zip(keys, mine[start:], strict=False), start):
            if not all(blocks) or not needs(index):
                continue
            if not runs or runs[-1].first + len(runs[-1].keys) != index:
                runs.append(BlockRange(number, [], [], index))
            runs[-1].keys.append(key)
            runs[-1].blocks.append(blocks)
        return runs


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks of one cluster: the keys they are stored under, and the engine's numbers for them, one per group."""

    cluster: int
    """The index in ``Shape.clusters``."""
    keys: list[bytes]
    blocks: list[tuple[int, ...]]
    first: int = 0
    """The index of the first among the cluster's blocks of its prompt; the others follow it."""
    seal: AdapterSnapshot | None = None
    """The adapter that computed them: they are stored only if its files are still the same."""
    hints: Hints = DEFAULT
    """How long they are worth keeping."""
    descents: list[bytes] = field(default_factory=list)
    """A packed descent for each block, b"" for none; empty if no block has one, or to load."""

    def picked(self, offsets: Sequence[int]) -> BlockRange:
        """Returns some of these blocks; ``first`` becomes that of a part without gaps."""
        return replace(
            self,
            keys=[self.keys[at] for at in offsets],
            blocks=[self.blocks[at] for at in offsets],
            first=self.first + (offsets[0] if offsets else 0),
            descents=[self.descents[at] for at in offsets] if self.descents else [],
        )


def block_key(hashed: Any, group: int, ending: bytes) -> bytes:
    """Returns the key of a block: vLLM's chained hash, and a cluster's first group, since groups have other layers.

    ``ending`` has what vLLM's hash lacks: 16 bytes if weights were replaced in memory, or for an adapter.
    """
    return bytes(hashed) + bytes([group]) + ending
