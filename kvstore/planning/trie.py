"""The compact trie of a batch, made by sorting: the common prefixes of neighbours are the trie.

A node is a prefix that several prompts share and where they part, or where one of them ends. Its depth is counted in
tokens, in full blocks. Node 0 is the root, the empty prefix. Leaves are not nodes: each prompt has its deepest node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.planning.prompts import ITEM, Counts, Prompts

STEP_ITEMS = 64
"""Items of the first comparison of two neighbours; the next ones grow, because most neighbours part early."""


@dataclass(frozen=True, slots=True)
class Trie:
    """The sorted prompts and the nodes above them. Positions count from 0 in sorted order."""

    order: Counts
    """By position: the prompt's index in the batch."""
    exact: Counts
    """By position: the tokens shared with the prompt before, in full items; 0 for the first."""
    shared: Counts
    """``exact``, rounded down to full blocks."""
    parent: Counts
    """By node; -1 for the root."""
    depth: Counts
    """By node: tokens of the prefix."""
    deepest: Counts
    """By position: the deepest node above the prompt."""

    @classmethod
    def of(cls, prompts: Prompts) -> Trie:
        """Sorts the prompts and builds the trie, in O(n log n) comparisons."""
        packed = prompts.packed
        order = sorted(range(len(packed)), key=packed.__getitem__)
        exact = np.zeros(len(order), np.int64)
        for at in range(1, len(order)):
            exact[at] = _common(packed[order[at - 1]], packed[order[at]])
        exact *= prompts.item_tokens
        shared = exact // prompts.block_tokens * prompts.block_tokens
        parent, depth, deepest = _nodes(shared.tolist())
        return cls(
            np.array(order, np.int64),
            exact,
            shared,
            np.array(parent, np.int64),
            np.array(depth, np.int64),
            np.array(deepest, np.int64),
        )

    @property
    def from_top(self) -> Counts:
        """All nodes, each behind its parent."""
        return np.argsort(self.depth, kind="stable")


def _common(one: bytes, two: bytes) -> int:
    """The number of leading items that are equal."""
    most = min(len(one), len(two)) // ITEM.itemsize
    a, b = np.frombuffer(one, ITEM, most), np.frombuffer(two, ITEM, most)
    at, step = 0, STEP_ITEMS
    while at < most:
        differ = a[at : at + step] != b[at : at + step]
        if differ.any():
            return at + int(differ.argmax())
        at, step = at + step, step * 4
    return most


def _nodes(shared: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Parent and depth of each node, and the deepest node of each position. One pass, the open path on a stack."""
    parent, depth, deepest = [-1], [0], [0] * len(shared)
    stack = [0]
    for at in range(1, len(shared) + 1):
        here = shared[at] if at < len(shared) else 0
        deepest[at - 1] = stack[-1]
        closed = -1
        while depth[stack[-1]] > here:
            closed = stack.pop()
        if depth[stack[-1]] < here:
            parent.append(stack[-1])
            depth.append(here)
            stack.append(len(depth) - 1)
            if closed >= 0:
                parent[closed] = stack[-1]  # the prompts part between the two: the new node comes between
            else:
                deepest[at - 1] = stack[-1]
    return parent, depth, deepest
