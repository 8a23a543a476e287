"""The order of a batch: depth first through the trie, so that a prefix is in memory only while it is needed.

Any depth-first order computes each shared prefix once, whatever the order of siblings. That leaves siblings free:
those with more output tokens for each token to compute go first, as in the paper, so that their decoding overlaps the
prefill of those behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.planning.prompts import Counts
from kvstore.planning.trie import Trie


@dataclass(frozen=True, slots=True)
class Order:
    """The positions of all prompts in the order to run them, and what each shares with the one before."""

    positions: Counts
    shared: Counts
    """Tokens in full blocks; 0 for the first."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """A prompt or a node with all below it, as its siblings see it."""

    splits: bool
    """True if groups of its own begin below: what its parent's group needs goes first, and stays together."""
    ratio: float
    """Output tokens for each token to compute."""
    first: int
    """The first prompt's index in the batch: equals are served in order of arrival."""
    at: int
    """The node, or ~position of a prompt."""

    @property
    def place(self) -> tuple[bool, float, int]:
        return self.splits, -self.ratio, self.first


def depth_first(trie: Trie, serving: Counts, computed: Counts, edges: Counts, decoded: Sequence[int]) -> Order:
    """The order to run the prompts in.

    ``serving``: by node, as ``serving_nodes`` gives it. ``computed``: by position, tokens of a prompt behind its
    deepest node that are to be computed. ``edges``: by node, tokens between it and its parent that are to be computed.
    ``decoded``: by position, output tokens.
    """
    below = _below(trie, serving, computed, edges, decoded)
    stack, positions, shared = [0], list[int](), list[int]()
    depth, parent, deepest = trie.depth.tolist(), trie.parent.tolist(), trie.deepest.tolist()
    low = 0  # depth of the highest node passed since the last prompt
    while stack:
        at = stack.pop()
        if at >= 0:
            low = min(low, depth[parent[at]] if at else 0)
            stack += [each.at for each in reversed(below[at])]
            continue
        node = deepest[~at]
        positions.append(~at)
        shared.append(min(low, depth[node]))
        low = depth[node]
    return Order(np.array(positions, np.int64), np.array(shared, np.int64))


def _below(trie: Trie, serving: Counts, computed: Counts, edges: Counts, decoded: Sequence[int]) -> list[list[_Unit]]:
    """By node: the prompts and nodes directly below it, in the order to run them."""
    count = len(trie.depth)
    compute, decode = edges.tolist(), [0] * count
    first, splits = [len(trie.order)] * count, [False] * count
    below: list[list[_Unit]] = [[] for _ in range(count)]
    rows = zip(trie.deepest.tolist(), trie.order.tolist(), computed.tolist(), decoded, strict=True)
    for position, (node, index, tokens, output) in enumerate(rows):
        below[node].append(_Unit(False, output / max(1, tokens), index, ~position))
        compute[node] += tokens
        decode[node] += output
        first[node] = min(first[node], index)
    parents, serves = trie.parent.tolist(), serving.tolist()
    for node in trie.from_top[::-1].tolist():
        below[node].sort(key=lambda unit: unit.place)
        if not node:
            break
        over = parents[node]
        is_split = over != 0 and (splits[node] or serves[node] == node)
        below[over].append(_Unit(is_split, decode[node] / max(1, compute[node]), first[node], node))
        compute[over] += compute[node]
        decode[over] += decode[node]
        first[over] = min(first[over], first[node])
        splits[over] |= splits[node] or serves[node] == node
    return below
