"""The expected hits of a trace when nothing is ever evicted: a trie over hash ids, without the store.

Independent of tokens, addresses and KV on purpose: the store's answers are compared with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.replay.trace import Request


@dataclass(frozen=True, slots=True)
class Expectation:
    """The hits of requests served one after the other: full blocks, by the request's number."""

    hits: dict[int, int]
    chunks_unique: int

    @property
    def blocks(self) -> int:
        """Number of full blocks that are hits, over all requests."""
        return sum(self.hits.values())


def expect(requests: Iterable[Request]) -> Expectation:
    """Returns the hits of each request, an unbroken run of full blocks from the first on, and the chunks stored."""
    nodes: dict[tuple[int, int], int] = {}
    hits: dict[int, int] = {}
    for request in requests:
        node, count, unbroken = 0, 0, True
        for hash_id in request.hash_ids[: request.full_blocks]:
            step = (node, hash_id)
            found = nodes.get(step)
            unbroken = unbroken and found is not None
            count += unbroken
            node = nodes.setdefault(step, len(nodes) + 1)
        hits[request.number] = count
    return Expectation(hits, len(nodes))
