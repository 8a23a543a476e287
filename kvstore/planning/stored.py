"""The tokens of each prompt that a store holds, from as few questions as the trie allows.

A store holds a prefix, or it does not: so prompts that share a chunk share the answer for it. Asked are first the
distinct first chunks, then, where that is held, the prompts that no later one continues.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstore.planning.prompts import Counts, Prompts
from kvstore.planning.trie import Trie

Ask = Callable[[list[tuple[int, int]]], list[int]]
"""Takes prompts as (index in the batch, leading chunks), sorted; returns how many of those chunks the store holds."""


def stored_tokens(prompts: Prompts, trie: Trie, chunk_tokens: int, ask: Ask) -> Counts:
    """By position: leading tokens that the store holds, a multiple of ``chunk_tokens``."""
    chunks = prompts.lengths[trie.order] // chunk_tokens
    shared = trie.exact // chunk_tokens
    held = np.zeros(len(trie.order), np.int64)
    begins = np.flatnonzero((chunks > 0) & (shared == 0))
    first = np.array(ask([(int(trie.order[at]), 1) for at in begins]), np.int64)
    wanted = np.zeros(len(held), bool)
    for at, end in zip(begins[first > 0], np.append(begins[1:], len(held))[first > 0], strict=True):
        wanted[at:end] = chunks[at:end] > 0
    # A prompt whose chunks all begin the next prompt gets its answer from that one.
    following = np.append(shared[1:], 0)
    asked = np.flatnonzero(wanted & (following < chunks))
    held[asked] = ask([(int(trie.order[at]), int(chunks[at])) for at in asked])
    for at in np.flatnonzero(wanted & (following >= chunks))[::-1]:
        held[at] = min(chunks[at], held[at + 1])
    return held * chunk_tokens


def agreed(trie: Trie, stored: Counts) -> tuple[Counts, Counts]:
    """By node and by position: stored leading tokens, where prompts that share a prefix agree on it.

    Answers may disagree because the store changes while it is asked. The best answer counts.
    """
    held = np.zeros(len(trie.depth), np.int64)
    np.maximum.at(held, trie.deepest, stored)
    for node in trie.from_top[:0:-1]:
        above = trie.parent[node]
        held[above] = max(held[above], held[node])
    held = np.minimum(held, trie.depth)
    return held, np.maximum(stored, held[trie.deepest])
