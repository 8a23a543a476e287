"""Finds the segments of a prompt in a node, within one deadline, and holds all of them with one hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.namespace import Namespace
from kvstore.node.asking import match_each
from kvstore.node.holds import Hold
from kvstore.node.lanes import Deadline
from kvstore.node.node import Node
from kvstore.segments import finding
from kvstore.segments.match import Match
from kvstore.segments.search import Range, Search

LISTING_SHARE = 0.5
"""Share of the time that may be spent waiting for a first listing: the rest is for looking at chunks."""


def find_segments(node: Node, namespace: Namespace, search: Search, deadline_s: float) -> list[Match]:
    """Returns the ranges of a prompt that are stored segments; fewer if the time runs out.

    Raises InvalidRequest for a namespace that is not one of segments.
    """
    if not namespace.has_segments:
        raise InvalidRequest(
            f"namespace {namespace.name!r} has no segments: expected that of cache.segments(rope), with kv=segment"
        )
    deadline = Deadline(node.clock, deadline_s)
    if search.starts is None:
        index = node.segments.searched(namespace, LISTING_SHARE * deadline.left_s())
    else:
        index = node.segments.of(namespace)

    def ask(ranges: Sequence[Range]) -> list[int]:
        prompts = (search.tokens[start:end] for start, end in ranges)
        counts = match_each(node, namespace, prompts, deadline.left_s(), alike=False)
        return counts + [0] * (len(ranges) - len(counts))

    return finding.find(search, namespace.layout.chunk_tokens, index, ask, lambda: not deadline.passed)


def hold_segments(
    node: Node,
    namespace: Namespace,
    search: Search,
    ttl_s: float | None,
    deadline_s: float,
) -> tuple[list[Match], Hold | None]:
    """Finds segments and holds what it finds; no hold if it finds nothing. Raises Overloaded if too many are alive.

    One hold is on all. It is taken before anybody looks (PROTOCOL.md, H2).
    """
    hold = node.holds.take(node.chains.of(namespace, np.empty(0, np.uint32)), ttl_s, whatever=True)
    try:
        matches = find_segments(node, namespace, search, deadline_s)
        chains = [node.chains.of(namespace, match.tokens) for match in matches]
        hold.mark = node.gc_view.protect(b"".join(chain.packed_addresses for chain in chains))
        if hold.mark is not None:  # on a host, what was found counts if it is there after this
            kept = [node.match(chain, deadline_s, counts=False) == len(chain) for chain in chains]
            matches = [match for match, is_kept in zip(matches, kept, strict=True) if is_kept]
        hold.found = tuple(chains)
    except BaseException:
        node.holds.release(hold)
        raise
    if not matches:
        node.holds.release(hold)
        return [], None
    return matches, hold
