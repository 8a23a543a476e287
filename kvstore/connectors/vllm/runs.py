"""A request's blocks by key: which ones to look up, to load and to store, from its hashes and its block tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.connectors.vllm.groups import Boundaries, Cluster, Kind
from kvstore.connectors.vllm.messages import Run, block_key

State = tuple[int, int, int]
"""The group, the block and the tokens of a recurrent state, as vLLM hands it over."""


@dataclass(frozen=True, slots=True)
class Named:
    """The source of the keys of a request's blocks: vLLM's hashes of its tokens, and an ending for all."""

    hashes: Sequence[bytes]
    ending: bytes


@dataclass(frozen=True, slots=True)
class Ends:
    """The boundaries of a request, in tokens. They decide which of its blocks later hits may need."""

    prompt_tokens: int
    parting: int
    """Tokens that the prompt shares with a stored one, if a hit could not have all of them: others may share them."""
    is_parting: bool
    """True if blocks before ``parting`` that the engine has itself are to be stored, too."""


class Runs:
    """Cuts requests into blocks. ``hash_tokens`` is how many tokens vLLM hashes at a time."""

    def __init__(self, clusters: Sequence[Cluster], hash_tokens: int) -> None:
        self.clusters = clusters
        self.hash_tokens = hash_tokens
        self.unit = math.lcm(*(each.block_tokens for each in clusters))
        """The least number of tokens that is whole blocks in every cluster."""
        self._boundaries = Boundaries.of(self.unit, clusters)

    def known_tokens(self, named: Named) -> int:
        """Returns the tokens that have keys."""
        return len(named.hashes) * self.hash_tokens

    def keys(self, named: Named, number: int, first: int, end: int) -> list[bytes]:
        """Returns the keys of a cluster's full blocks that begin in ``[first, end)`` tokens."""
        cluster = self.clusters[number]
        size, per_block = cluster.block_tokens, cluster.block_tokens // self.hash_tokens
        indices = range(first // size, min(end // size, len(named.hashes) // per_block))
        return [
            block_key(named.hashes[(index + 1) * per_block - 1], cluster.groups[0], named.ending) for index in indices
        ]

    def loads(self, named: Named, tables: Sequence[Sequence[int]], first: int, end: int) -> list[Run]:
        """Returns the blocks that a hit of ``end`` tokens needs, without those before ``first``."""
        runs = []
        for number, cluster in enumerate(self.clusters):

            def needs(index: int, least: int = cluster.first_block(end)) -> bool:
                return index >= least

            runs += self._cut(named, number, tables, (first, end), needs)
        return runs

    def stores(self, named: Named, tables: Sequence[Sequence[int]], first: int, end: int, ends: Ends) -> list[Run]:
        """Returns the blocks in ``[first, end)`` tokens that later hits may need, without states."""
        runs = []
        for number, cluster in enumerate(self.clusters):
            begin = first
            if ends.is_parting and cluster.kind is Kind.WINDOW:
                begin = min(first, cluster.first_block(ends.parting) * cluster.block_tokens)

            def needs(index: int, cluster: Cluster = cluster) -> bool:
                return self._boundaries.needs(cluster, index, ends.prompt_tokens, ends.parting)

            if cluster.kind is not Kind.STATE:
                runs += self._cut(named, number, tables, (begin, end), needs)
        return runs

    def states(self, named: Named, offered: Sequence[State], computed: int, end: int) -> list[Run]:
        """Returns the states that a step brings to a boundary behind ``computed`` tokens and up to ``end``.

        Which blocks they are in only vLLM knows: their places in the tables change.
        """
        runs = []
        for number, cluster in enumerate(self.clusters):
            found = {(tokens, group): block for group, block, tokens in offered if group in cluster.groups}
            for boundary in sorted({tokens for tokens, _ in found}):
                blocks = tuple(found.get((boundary, group), 0) for group in cluster.groups)
                # It offers what was loaded, too, and what ends within a block.
                if all(blocks) and computed < boundary <= end and boundary % cluster.block_tokens == 0:
                    first = boundary - cluster.block_tokens
                    keys = self.keys(named, number, first, boundary)
                    runs.append(Run(number, keys, [blocks], first // cluster.block_tokens))
        return runs

    def _cut(
        self,
        named: Named,
        number: int,
        tables: Sequence[Sequence[int]],
        between: tuple[int, int],
        needs: Callable[[int], bool],
    ) -> list[Run]:
        """Returns a cluster's full blocks between two tokens that are needed and exist, in runs without gaps.

        ``tables`` are the request's blocks of each group; block 0 is one outside the window.
        """
        cluster, runs = self.clusters[number], list[Run]()
        mine = list(zip(*(tables[group] for group in cluster.groups), strict=False))
        start = between[0] // cluster.block_tokens
        keys = self.keys(named, number, *between)
        for index, (key, blocks) in enumerate(zip(keys, mine[start:], strict=False), start):
            if not all(blocks) or not needs(index):
                continue
            if not runs or runs[-1].first + len(runs[-1].keys) != index:
                runs.append(Run(number, [], [], index))
            runs[-1].keys.append(key)
            runs[-1].blocks.append(blocks)
        return runs
