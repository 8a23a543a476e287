"""The plan of a batch: groups, order, and the tokens that are computed. Made by ``make_plan``.

The order is depth first through the trie, so that a prefix is in memory only while it is needed. Any depth-first order
computes each shared prefix once, whatever the order of siblings, which go in order of arrival.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from kvstore.batch.prompts import Counts, Group, PromptSet, Trie
from kvstore.batch.run import Run, Storage
from kvstore.core.validate import brief, is_whole
from kvstore.errors import InvalidRequest

# Memory with least-recently-used eviction: what a batch saves in an unplanned order.
#
# As in engines, a prompt's last blocks go first and its first blocks last, and a prompt reuses leading blocks only.
# The blocks of one edge of the trie are used together, so memory is kept by edges, whose tails may be evicted:
# the result is that of single blocks.


STEPS_MAX = 50_000_000
"""Limit on edges visited, about a minute: the prompts of a very deep trie visit many each."""


def tokens_found(trie: Trie, order: Iterable[int], full: Counts, memory_tokens: int) -> Counts | None:
    """By position: leading tokens found in memory, if the prompts run in ``order`` (positions), one at a time.

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


# Groups of one level: the nodes to open, so that the fewest tokens are computed with one shared prefix a prompt.
#
# An open node v with k members computes its prefix once: it saves ``gain(v) * (k - 1)`` tokens, where ``gain(v)`` is
# what the store does not hold of the prefix. A prompt is a member of the nearest open node above it. For a node v and
# the nearest open node a above it, the most that can be saved below v is
#
# f(v, a) = max( gain(a) * ends(v) + sum f(c, a), v stays closed gain(v) * (ends(v) - 1) + sum f(c, v) ) v is opened
#
# over the children c, where ``ends(v)`` counts the prompts whose deepest node is v. The recursion tries both for
# every pair, so it is exact (PLANNING.md has the bound).


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


# The tokens of each prompt that a store holds, from as few questions as the trie allows.
#
# A store holds a prefix, or it does not: so prompts that share a chunk share the answer for it. Asked are first the
# distinct first chunks, then, where that is held, the prompts that no later one continues.


Ask = Callable[[list[tuple[int, int]]], list[int]]
"""Takes prompts as (index in the batch, leading chunks), sorted; returns how many of those chunks the store holds."""


def stored_tokens(prompts: PromptSet, trie: Trie, chunk_tokens: int, ask: Ask) -> Counts:
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


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """The positions of all prompts in the order to run them, and what each shares with the one before."""

    positions: Counts
    shared: Counts
    """Tokens in full blocks; 0 for the first."""


Unit = tuple[bool, int, int]
"""A prompt, or a node with all below it, in the order of siblings: True if groups of its own begin below (what its
parent's group needs goes first, and stays together), the first prompt's index in the batch, and the node or ~position.
"""


def depth_first(trie: Trie, serving: Counts) -> PromptOrder:
    """The order to run the prompts in. ``serving``: by node, as ``serving_nodes`` gives it."""
    below = _below(trie, serving)
    stack, positions, shared = [0], list[int](), list[int]()
    depth, parent, deepest = trie.depth.tolist(), trie.parent.tolist(), trie.deepest.tolist()
    low = 0  # depth of the highest node passed since the last prompt
    while stack:
        at = stack.pop()
        if at >= 0:
            low = min(low, depth[parent[at]] if at else 0)
            stack += [each for _, _, each in reversed(below[at])]
            continue
        node = deepest[~at]
        positions.append(~at)
        shared.append(min(low, depth[node]))
        low = depth[node]
    return PromptOrder(np.array(positions, np.int64), np.array(shared, np.int64))


def _below(trie: Trie, serving: Counts) -> list[list[Unit]]:
    """By node: the prompts and nodes directly below it, in the order to run them."""
    count = len(trie.depth)
    first, splits = [len(trie.order)] * count, [False] * count
    below: list[list[Unit]] = [[] for _ in range(count)]
    for position, (node, index) in enumerate(zip(trie.deepest.tolist(), trie.order.tolist(), strict=True)):
        below[node].append((False, index, ~position))
        first[node] = min(first[node], index)
    parents, serves = trie.parent.tolist(), serving.tolist()
    for node in trie.from_top[::-1].tolist():
        below[node].sort()
        if not node:
            break
        over = parents[node]
        is_split = splits[node] or serves[node] == node
        below[over].append((over != 0 and is_split, first[node], node))
        first[over] = min(first[over], first[node])
        splits[over] |= is_split
    return below


# The plan of a batch: groups, order, and the tokens that are computed.


COUNT_MAX = (1 << 63) - 1
"""Limit on a number of tokens that a caller names."""


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """A batch's groups and order, which can be run. Counts are tokens of all prompts; output tokens are not in them.

    ``Cache.plan`` makes it. It keeps the prompts, 4 bytes a token.
    """

    groups: tuple[Group, ...]
    """In the order to run them."""
    tokens_total: int
    tokens_stored: int
    """Leading tokens that the store holds, of each prompt."""
    tokens_to_compute: int
    """Computed in the plan's order, one prompt after another, with ``memory_tokens`` of memory."""
    tokens_optimum: int
    """Computed if memory had no limit: what no order can go below."""
    tokens_one_level: int
    """Computed if members of a group shared its prefix, and nothing else were shared."""
    tokens_arrival: int | None
    """Computed in order of arrival, memory evicting what was used least recently; None if the trie is too deep."""
    memory_tokens: int
    block_tokens: int
    storage: Storage = field(compare=False)
    """The store, for runs."""

    def run(self, *, ahead: int = 2, attempts: int = 3) -> Run:
        """Runs the plan: ``with plan.run() as run: for group in run: ...``. Several runs are independent.

        ``ahead`` groups are brought into memory before their turn; a group goes out at most ``attempts`` times.
        Consumers are threads of this process (``kvstore.aio`` has tasks).
        """
        return Run(self, ahead, attempts)

    @property
    def order(self) -> list[int]:
        """The indices of all prompts, in the order to run them."""
        return [member for group in self.groups for member in group.members]

    @property
    def saving(self) -> float:
        """The share of all tokens that need not be computed, 0 to 1."""
        return self.share_saved(self.tokens_to_compute)

    def share_saved(self, tokens: int) -> float:
        """The share of all tokens that is saved if ``tokens`` are computed."""
        return 1 - tokens / self.tokens_total if self.tokens_total else 0.0

    def __repr__(self) -> str:
        return (
            f"<kvstore.Plan {sum(len(group.members) for group in self.groups)} prompts in {len(self.groups)} groups, "
            f"{self.tokens_to_compute} of {self.tokens_total} tokens to compute>"
        )


def make_plan(
    prompts: PromptSet,
    *,
    memory_tokens: int,
    chunk_tokens: int = 1,
    storage: Storage | None = None,
) -> Plan:
    """Plans a batch.

    ``memory_tokens`` is the KV that the engine keeps, in tokens. ``storage`` has chunks of ``chunk_tokens`` tokens;
    blocks must then be whole chunks. Raises InvalidRequest.
    """
    if not (is_whole(memory_tokens) and 0 <= memory_tokens <= COUNT_MAX):
        raise InvalidRequest(
            f"memory_tokens={brief(memory_tokens)}: expected a whole number of tokens, from 0 to {COUNT_MAX}"
        )
    trie = Trie.of(prompts)
    stored = np.zeros(len(trie.order), np.int64)
    if storage is not None:
        if prompts.block_tokens % chunk_tokens:
            # Half a chunk cannot be loaded: what the store saves would depend on the order.
            raise InvalidRequest(
                f"blocks of {prompts.block_tokens} tokens: expected a multiple of the store's {chunk_tokens}"
            )
        stored = stored_tokens(prompts, trie, chunk_tokens, storage.stored)
    return _Planning(prompts, trie, stored, int(memory_tokens)).plan(storage or Storage())


class _Planning:
    """The values that all steps of one plan use. Arrays are by position or by node."""

    def __init__(self, prompts: PromptSet, trie: Trie, stored: Counts, memory_tokens: int) -> None:
        self._prompts = prompts
        self._trie = trie
        self._memory_tokens = memory_tokens
        self._lengths = prompts.lengths[trie.order]
        self._held, self._stored = agreed(trie, stored)
        self._serving = serving_nodes(trie, self._held)

    def plan(self, storage: Storage) -> Plan:
        """Puts the prompts in order and counts."""
        trie, block = self._trie, self._prompts.block_tokens
        order = depth_first(trie, self._serving)
        found = np.minimum(order.shared, self._memory_tokens // block * block)
        computed = self._lengths[order.positions] - np.maximum(found, self._stored[order.positions])
        return Plan(
            groups=self._groups(order, computed),
            tokens_total=self._prompts.tokens_total,
            tokens_stored=int(self._stored.sum()),
            tokens_to_compute=int(computed.sum()),
            tokens_optimum=int(self._behind(trie.shared).sum()),
            tokens_one_level=self._one_level(),
            tokens_arrival=self._arrival(),
            memory_tokens=self._memory_tokens,
            block_tokens=block,
            storage=storage,
        )

    def _behind(self, found: Counts) -> Counts:
        """By position: tokens to compute if ``found`` leading ones are in memory."""
        return self._lengths - np.maximum(found, self._stored)

    def _one_level(self) -> int:
        depth = self._trie.depth
        members = self._serving[self._trie.deepest]
        opened = np.unique(members)
        prefixes = depth[opened] - self._held[opened]
        return int(prefixes.sum() + self._behind(depth[members]).sum())

    def _arrival(self) -> int | None:
        block = self._prompts.block_tokens
        arrival = np.argsort(self._trie.order).tolist()
        full = self._lengths // block * block
        found = tokens_found(self._trie, arrival, full, self._memory_tokens // block * block)
        return None if found is None else int(self._behind(found).sum())

    def _groups(self, order: PromptOrder, computed: Counts) -> tuple[Group, ...]:
        """The runs of prompts behind one open node; those that share nothing are alone."""
        serving = self._serving[self._trie.deepest[order.positions]]
        is_first = (serving == 0) | (serving != np.append(-1, serving[:-1])[: len(serving)])
        starts = np.flatnonzero(is_first).tolist()
        indices, costs = self._trie.order[order.positions].tolist(), computed.tolist()
        stored = self._stored[order.positions].tolist()
        groups: list[Group] = []
        for start, end in zip(starts, [*starts, len(indices)][1:], strict=True):
            node = serving[start]
            groups.append(
                Group(
                    prefix_tokens=int(self._trie.depth[node]),
                    stored_tokens=int(self._held[node]),
                    members=tuple(indices[start:end]),
                    computed=tuple(costs[start:end]),
                    stored=tuple(stored[start:end]),
                )
            )
        return tuple(groups)
