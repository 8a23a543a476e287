"""Matches several prompts in one call and within one deadline."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.namespace import Namespace
from kvstore.node.deadline import Deadline
from kvstore.node.node import Node
from kvstore.tokens import TokenArray


def match_each(node: Node, namespace: Namespace, prompts: Iterable[TokenArray], deadline_s: float) -> list[int]:
    """Returns the number of leading chunks of each prompt; fewer answers if the time runs out.

    Prompts that begin alike should follow one another: what they share is hashed once. They leave out the hit ratio.
    """
    deadline = Deadline(node.clock, deadline_s)
    counts: list[int] = []
    for tokens in prompts:
        if deadline.passed:
            break
        counts.append(node.match(node.chains.of(namespace, tokens), deadline.left_s(), counts=False))
    return counts
