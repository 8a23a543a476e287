"""Groups of layers that keep their KV alike: what a hit needs of each, and what is worth storing for later hits.

A hit ends at a **boundary**, a multiple of a *unit* of tokens, the least that all groups have in whole blocks. Full
attention needs all blocks before it, a window the last few, a recurrent layer only the state at the boundary itself.
So a window's blocks are worth storing only before boundaries at which later prompts are likely to part.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WINDOWS_APART = 4
"""Windows are stored whole once in this many windows of a prompt: of five window layers beside one that sees
everything, 0.25 of the bytes, 37.5 % of all. A prompt that parts from all others between two of them loses less than
this many windows of a hit, once: the next one finds what was stored there for it."""
SPAN_UNITS = 256
"""Boundaries whose blocks are asked for in one call to the store."""


@enum.unique
class Kind(enum.Enum):
    """How a group's state depends on the tokens before it."""

    FULL = "attention to all tokens"
    WINDOW = "attention to the last tokens"
    CHUNK = "attention to the tokens since the last multiple of a length"
    STATE = "recurrent: one state for all tokens before it"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Groups of one kind and block size, whose blocks for the same tokens lie in one file."""

    groups: tuple[int, ...]
    """vLLM's numbers of its groups. The first is in the keys."""
    block_tokens: int
    kind: Kind = Kind.FULL
    reach_tokens: int = 0
    """Tokens that a window sees, or the length of a chunk."""

    def first_block(self, boundary: int) -> int:
        """Returns the index of the first block that a hit of ``boundary`` tokens needs; vLLM allocates none before."""
        skipped = 0
        if self.kind is Kind.WINDOW:
            skipped = max(0, boundary - self.reach_tokens + 1)
        elif self.kind is Kind.CHUNK:
            skipped = boundary // self.reach_tokens * self.reach_tokens
        elif self.kind is Kind.STATE:
            skipped = max(0, boundary - 1)
        return skipped // self.block_tokens


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The boundaries at which an engine stores the blocks of windows."""

    unit: int
    apart: int
    """Tokens between two of them in a prompt."""

    @classmethod
    def of(cls, unit: int, clusters: Sequence[Cluster]) -> Boundaries:
        """Returns the boundaries of a model. They are everywhere where only some can be hit: between states."""
        reach = max((each.reach_tokens for each in clusters if each.kind is Kind.WINDOW), default=0)
        if not reach or any(each.kind is Kind.STATE for each in clusters):
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

    def needs(self, cluster: Cluster, index: int, prompt_tokens: int, parting: int) -> bool:
        """True if a later hit may need this block of the cluster."""
        if cluster.kind is not Kind.WINDOW:
            return True
        boundary = self.next((index + 1) * cluster.block_tokens, prompt_tokens, parting)
        return cluster.first_block(boundary) <= index


@dataclass(frozen=True, slots=True)
class Tail:
    """The keys of a cluster's blocks, from a prompt's first one on. None: not to be asked for."""

    cluster: Cluster
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
