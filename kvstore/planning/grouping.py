"""Groups of one level: the nodes to open, so that the fewest tokens are computed with one shared prefix a prompt.

An open node v with k members computes its prefix once: it saves ``gain(v) * (k - 1)`` tokens, where ``gain(v)`` is
what the store does not hold of the prefix. A prompt is a member of the nearest open node above it. For a node v and
the nearest open node a above it, the most that can be saved below v is

    f(v, a) = max( gain(a) * ends(v) + sum f(c, a),            v stays closed
                   gain(v) * (ends(v) - 1) + sum f(c, v) )     v is opened

over the children c, where ``ends(v)`` counts the prompts whose deepest node is v. The recursion tries both for every
pair, so it is exact (PLANNING.md has the bound).
"""

from __future__ import annotations

import numpy as np

from kvstore.planning.prompts import Counts
from kvstore.planning.trie import Trie

LEVELS_MAX = 32
"""Open nodes are looked for this many levels above a node, and at the root: exact for tries no deeper than this."""


def serving_nodes(trie: Trie, held: Counts) -> Counts:
    """By node: the open node whose members its own prompts are; 0 (the root) where they share nothing.

    Of two choices that compute the same, the one that loads fewer stored tokens wins.
    """
    gain = _gains(trie, held)
    opens = _choices(trie, gain)
    serving = np.zeros(len(trie.depth), np.int64)
    above = [0] * len(trie.depth)
    for node in trie.from_top[1:].tolist():
        parent = int(trie.parent[node])
        # The place of the nearest open node among the ancestors of this node.
        if parent and serving[parent] != parent:
            above[node] = min(above[parent] + 1, len(opens[node]) - 1)
        serving[node] = node if opens[node][above[node]] else serving[parent]
    return serving


def _gains(trie: Trie, held: Counts) -> list[int]:
    """By node: tokens that a further member saves, computed ones before loaded ones."""
    weight = 1 + len(trie.order) * int(trie.depth.max())  # more than all loads together
    pairs = zip((trie.depth - held).tolist(), held.tolist(), strict=True)
    return [computed * weight + loaded for computed, loaded in pairs]


def _choices(trie: Trie, gain: list[int]) -> list[list[bool]]:
    """By node: whether to open it, for each place of the nearest open node above: parent, its parent, ..., the root."""
    count = len(trie.depth)
    parent = trie.parent.tolist()
    ends = np.bincount(trie.deepest, minlength=count).tolist()
    top_down = trie.from_top.tolist()
    gains: list[list[int]] = [[] for _ in range(count)]
    for node in top_down[1:]:
        over = parent[node]
        gains[node] = [gain[over], *gains[over][: LEVELS_MAX - 1], *([0] if len(gains[over]) >= LEVELS_MAX else [])]
    below: list[list[int]] = [[0] * (len(each) + 1) for each in gains]
    opens: list[list[bool]] = [[] for _ in range(count)]
    for node in reversed(top_down[1:]):
        sums = below[node]
        opened = gain[node] * (ends[node] - 1) + sums[0]
        closed = [each * ends[node] + saved for each, saved in zip(gains[node], sums[1:], strict=True)]
        opens[node] = [opened > each for each in closed]
        _add(below[parent[node]], [max(opened, each) for each in closed])
    return opens


def _add(sums: list[int], values: list[int]) -> None:
    """Adds a child's values to its parent's sums; places beyond the child's last are those of the root."""
    last = len(values) - 1
    for place in range(len(sums)):
        sums[place] += values[min(place, last)]
