"""Memory with least-recently-used eviction: what a batch saves in an order that nobody planned.

As in engines, a prompt's last blocks go first and its first blocks last, and a prompt reuses leading blocks only. The
blocks of one edge of the trie are used together, so memory is kept by edges, of which the tail may be evicted: the
result is that of single blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from kvstore.planning.prompts import Counts
from kvstore.planning.trie import Trie

STEPS_MAX = 50_000_000
"""Limit on edges visited, about a minute: the prompts of a very deep trie visit many each."""


def tokens_found(trie: Trie, order: Iterable[int], full: Counts, memory_tokens: int) -> Counts | None:
    """By position: leading tokens found in memory, if the prompts run in ``order`` (positions), none at once.

    ``full``: by position, the tokens of a prompt's full blocks. None if the trie is too deep for the simulation.
    """
    levels = np.zeros(len(trie.depth), np.int64)
    for node in trie.from_top[1:]:
        levels[node] = levels[trie.parent[node]] + 1
    if int(levels[trie.deepest].sum()) > STEPS_MAX:
        return None
    memory = _Memory(memory_tokens)
    found = np.zeros(len(full), np.int64)
    depth, parent = trie.depth.tolist(), trie.parent.tolist()
    count = len(depth)
    for position in order:
        node = int(trie.deepest[position])
        path = [(count + position, int(full[position]) - depth[node])]
        while node:
            path.append((node, depth[node] - depth[parent[node]]))
            node = parent[node]
        found[position] = memory.run(path)
    return found


class _Memory:
    """The edges in memory, the least recently used first, each with its leading tokens that are still there."""

    def __init__(self, tokens_max: int) -> None:
        self._tokens_max = tokens_max
        self._edges: OrderedDict[int, int] = OrderedDict()
        self._tokens = 0

    def run(self, path: list[tuple[int, int]]) -> int:
        """Runs a prompt, given its edges and their tokens from the last to the first; returns leading tokens found."""
        found = 0
        for edge, size in reversed(path):
            here = self._edges.get(edge, 0)
            found += here
            if here < size:
                break
        for edge, size in path:
            self._tokens += size - self._edges.pop(edge, 0)
            self._edges[edge] = size
        while self._tokens > self._tokens_max:
            edge, size = next(iter(self._edges.items()))
            left = size - min(size, self._tokens - self._tokens_max)
            self._tokens -= size - left
            if left:
                self._edges[edge] = left
            else:
                del self._edges[edge]
        return found
