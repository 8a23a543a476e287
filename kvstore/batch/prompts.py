"""The prompts of a batch, packed: items as big-endian u32, so that prompts sort as their bytes do.

An item is a token, or in traces a block of tokens under its hash id.
A prompt costs 4 bytes an item here, and nothing of the caller's is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.core.address import TokenArray, Tokens
from kvstore.core.buffers import token_array
from kvstore.core.validate import brief, is_whole
from kvstore.errors import InvalidRequest

# A group of a plan.


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts that run one after another behind one shared prefix."""

    prefix_tokens: int
    """Leading tokens that all members share; 0 for a prompt that shares nothing."""
    stored_tokens: int
    """Leading tokens of the prefix that the store held when the plan was made."""
    members: tuple[int, ...]
    """Indices of the prompts in the batch, in the order to run them."""
    computed: tuple[int, ...]
    """Tokens that each member computes, run in the plan's order."""
    stored: tuple[int, ...]
    """Leading tokens of each member that the store held when the plan was made."""

    @property
    def tokens_to_compute(self) -> int:
        """Tokens that all members compute."""
        return sum(self.computed)


Counts = npt.NDArray[np.int64]
T = TypeVar("T")

ITEM = np.dtype(">u4")
PROMPTS_MAX = 4_194_304
ITEMS_MAX = 1 << 31
"""Limit on the items of a batch: 8 GiB packed."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """All prompts of a batch. Made by ``of_tokens``, which checks."""

    packed: list[bytes]
    """Items of each prompt as big-endian u32."""
    lengths: Counts
    """Tokens of each prompt, those behind its last item included."""
    item_tokens: int
    block_tokens: int
    """Tokens of a block, which prompts share as a whole or not at all; a multiple of ``item_tokens``."""

    @classmethod
    def of_tokens(cls, prompts: Iterable[Tokens], block_tokens: int = 1) -> PromptSet:
        """Prompts as token ids. Raises InvalidRequest, naming the prompt, for one that is empty or no tokens."""
        if not is_whole(block_tokens) or block_tokens < 1:
            raise InvalidRequest(f"block_tokens={brief(block_tokens)}: expected 1 token or more")
        packed, lengths, items_count = list[bytes](), list[int](), 0
        for number, tokens in enumerate(checked_prompts(prompts)):
            try:
                if isinstance(tokens, list | tuple) and bool in set(map(type, tokens)):
                    raise InvalidRequest("the tokens have a boolean among them: expected integers")
                array = token_array(tokens)
            except InvalidRequest as cause:
                raise InvalidRequest(f"prompt {number}: {cause}") from cause
            if not len(array):
                raise InvalidRequest(f"prompt {number} is empty: expected 1 token or more")
            items_count += len(array)
            if number == PROMPTS_MAX or items_count > ITEMS_MAX:
                raise InvalidRequest(
                    f"prompt {number} is over the limits of a batch, {PROMPTS_MAX} prompts and {ITEMS_MAX} tokens: "
                    "split the batch"
                )
            packed.append(array.astype(ITEM).tobytes())
            lengths.append(len(array))
        return cls(packed, np.array(lengths, np.int64), 1, block_tokens)

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def tokens_total(self) -> int:
        """Tokens of all prompts."""
        return int(self.lengths.sum())

    def tokens(self, index: int, count: int | None = None) -> TokenArray:
        """The first ``count`` items (None: all) of one prompt, as token ids."""
        return np.frombuffer(self.packed[index], ITEM, -1 if count is None else count).astype("<u4")


def checked_prompts(prompts: Iterable[T]) -> Iterator[T]:
    """Returns an iterator over ``prompts``. Raises InvalidRequest for text and for what cannot be iterated."""
    try:
        if not isinstance(prompts, str | bytes):
            return iter(prompts)
        cause = None
    except TypeError as error:
        cause = error
    raise InvalidRequest(f"prompts are {brief(prompts)}: expected a list of prompts") from cause


# The compact trie of a batch, made by sorting: the common prefixes of neighbours are the trie.
#
# A node is a prefix that several prompts share and where they part, or where one of them ends. Its depth is counted
# in tokens, in full blocks. Node 0 is the root, the empty prefix. Leaves are not nodes: each prompt has its deepest
# node.


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
    def of(cls, prompts: PromptSet) -> Trie:
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
