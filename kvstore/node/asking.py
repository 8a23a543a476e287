"""Matches several prompts in one call and within one deadline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from kvstore.address import Chain
from kvstore.namespace import Namespace
from kvstore.node.lanes import Deadline
from kvstore.node.node import Node
from kvstore.node.wanted import leading
from kvstore.tokens import TokenArray

AT_ONCE = 256
"""Prompts whose chunks are looked for at once among those that the node remembers: segments are many and short."""


def match_each(
    node: Node,
    namespace: Namespace,
    prompts: Iterable[TokenArray],
    deadline_s: float,
) -> list[int]:
    """Returns the number of leading chunks of each prompt; fewer answers if the time runs out.

    Prompts that begin alike should follow one another: what they share is hashed once. They leave out the hit ratio.
    """
    deadline = Deadline(node.clock, deadline_s)
    counts: list[int] = []
    left = iter(prompts)
    while not deadline.passed:
        group = list(islice(left, AT_ONCE))
        if not group:
            break
        chains = [node.chains.of(namespace, tokens) for tokens in group]
        addresses = [address for chain in chains for address in chain.addresses]
        present = bytes(node.reads.remembered(addresses))
        for chain, remembered in zip(chains, _leading(present, chains), strict=True):
            if deadline.passed:
                break
            whole = remembered == len(chain) == node.gc_view.leading(chain)
            counts.append(remembered if whole else node.match(chain, deadline.left_s(), counts=False))
    return counts


def _leading(present: bytes, chains: list[Chain]) -> Iterator[int]:
    """Yields the number of leading chunks of each that are present, one byte for each chunk of all of them."""
    start = 0
    for chain in chains:
        yield leading(present[start : start + len(chain)])
        start += len(chain)
