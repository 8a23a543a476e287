"""The plan of a batch: groups, order, and the tokens that are computed. Made by ``make_plan``."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvstore.batch.order import PromptOrder, agreed, depth_first, serving_nodes, stored_tokens, tokens_found
from kvstore.batch.prompts import Counts, Group, PromptSet, Trie
from kvstore.batch.run import Run, Storage
from kvstore.core.validate import brief, is_whole
from kvstore.errors import InvalidRequest

COUNT_MAX = (1 << 63) - 1
"""Limit on a number of tokens that a caller names."""


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """A batch's groups and order, which can be run. Counts are tokens of all prompts; output tokens are not in them.

    ``Cache.plan`` and ``BlockCache.plan`` make it. It keeps the prompts, 4 bytes a token.
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
                    shared_before=int(order.shared[start]),
                    members=tuple(indices[start:end]),
                    computed=tuple(costs[start:end]),
                    stored=tuple(stored[start:end]),
                )
            )
        return tuple(groups)
