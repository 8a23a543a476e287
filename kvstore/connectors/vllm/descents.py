"""Descents: what the connector writes into the files of blocks, so that ``kvstore events`` can announce the blocks.

Only the store learns that a collector deleted a block, and it announces that by the same hash. Only blocks of full
attention are described, which every hit needs from the first on. Windows and recurrent states are stored here and
there: a router that counts a prompt's leading blocks would take their gaps, and their removal, for its end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys

from kvstore.connectors.vllm.blocks import BlockRange, GroupKind, LayerGroups
from kvstore.errors import InvalidRequest
from kvstore.format.header import Descent


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

    def __init__(self, clusters: Sequence[LayerGroups], hash_tokens: int) -> None:
        self.clusters = clusters
        self._hash_tokens = hash_tokens

    def blocks(self, request: Any, run: BlockRange) -> Iterator[Described]:
        """Yields the blocks of a run of this request; none unless it is of full attention."""
        cluster, hashes, media = self.clusters[run.cluster], request.block_hashes, 0
        if cluster.kind is not GroupKind.FULL:
            return
        size, per_block = cluster.block_tokens, cluster.block_tokens // self._hash_tokens
        for index, key in enumerate(run.keys, run.first):
            start, end = index * size, (index + 1) * size
            extra_keys, media = generate_block_hash_extra_keys(request, start, end, media)
            parent = bytes(hashes[index * per_block - 1]) if index else None
            hashed = bytes(hashes[(index + 1) * per_block - 1])
            yield Described(key, index, hashed, parent, request.all_token_ids[start:end], extra_keys)

    def descents(self, request: Any, run: BlockRange) -> list[bytes]:
        """Returns the packed descent of each block of a run; b"" where there is nothing to say that fits."""
        lora = request.lora_request
        name = None if lora is None else lora.lora_name
        group = self.clusters[run.cluster].groups[0]
        return [_packed(each, group, name) for each in self.blocks(request, run)]


def _packed(block: Described, group: int, lora_name: str | None) -> bytes:
    hash_bytes = len(block.hashed)
    parent = b"" if block.parent is None else block.parent + block.key[hash_bytes:]
    try:
        extra = _extra(block, lora_name)
        return Descent(block.tokens, block.index, parent, hash_bytes, group, extra).pack()
    except (InvalidRequest, TypeError, ValueError):
        return b""  # more tokens or extra keys than a descent has room for, or keys that JSON does not know


def _extra(block: Described, lora_name: str | None) -> bytes:
    """Returns what the hash covers in addition to tokens. Raises TypeError or ValueError if JSON cannot encode it."""
    keys = to_event_extra_keys([block.extra_keys])
    said = {"lora_name": lora_name, "extra_keys": keys[0] if keys else None}
    said = {name: value for name, value in said.items() if value}
    return json.dumps(said, separators=(",", ":"), allow_nan=False).encode() if said else b""
