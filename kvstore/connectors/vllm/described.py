"""Blocks as vLLM names them: hash, the hash before it, tokens, and what else its hash covers.

Separate from events and descents, which both say this of blocks: one to the engine's own publisher, one in their files.
Only blocks of full attention are described, which every hit needs from the first on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvstore.connectors.vllm.groups import Cluster, Kind
from kvstore.connectors.vllm.messages import Run


@dataclass(frozen=True, slots=True)
class Described:
    """One block."""

    key: bytes
    index: int
    """Its index among the blocks of its cluster in the prompt."""
    hashed: bytes
    parent: bytes | None
    """The hash of the block before it; None for the first one."""
    tokens: Sequence[int]
    extra_keys: tuple[Any, ...] | None


class Describer:
    """Describes the blocks of one engine. ``clusters`` and ``hash_tokens`` are those of ``Shape``."""

    def __init__(self, clusters: Sequence[Cluster], hash_tokens: int) -> None:
        self.clusters = clusters
        self._hash_tokens = hash_tokens

    def blocks(self, request: Any, run: Run) -> Iterator[Described]:
        """Yields the blocks of a run of this request; none unless it is of full attention."""
        cluster, hashes, media = self.clusters[run.cluster], request.block_hashes, 0
        if cluster.kind is not Kind.FULL:
            return
        size, per_block = cluster.block_tokens, cluster.block_tokens // self._hash_tokens
        for index, key in enumerate(run.keys, run.first):
            start, end = index * size, (index + 1) * size
            extra_keys, media = generate_block_hash_extra_keys(request, start, end, media)
            parent = bytes(hashes[index * per_block - 1]) if index else None
            hashed = bytes(hashes[(index + 1) * per_block - 1])
            yield Described(key, index, hashed, parent, request.all_token_ids[start:end], extra_keys)
