"""Descents: what the connector writes into the files of blocks, for ``kvstore events`` to tell routers of them.

An engine's own events say what it stored and found missing. That a collector took a block from the store only the store
knows, and it tells it by the same hash.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from vllm.v1.core.kv_cache_utils import to_event_extra_keys

from kvstore.connectors.vllm.described import Described, Describer
from kvstore.connectors.vllm.messages import Run
from kvstore.errors import InvalidRequest
from kvstore.format.header import NO_WHOLE, WHOLE_BYTES, Descent
from kvstore.namespace import NamespaceDigest


class Descents:
    """The descents of one engine's blocks. ``digests`` are those of the namespaces of all parts of a block."""

    def __init__(self, describer: Describer, digests: Sequence[NamespaceDigest]) -> None:
        self._describer = describer
        self._parts = len(digests)
        joined = blake2b(b"".join(digests), digest_size=WHOLE_BYTES).digest()
        self._whole = joined if len(digests) > 1 else NO_WHOLE

    def of(self, request: Any, run: Run) -> list[bytes]:
        """Returns the packed descent of each block of a run; b"" where there is nothing to say that fits."""
        lora = request.lora_request
        name = None if lora is None else lora.lora_name
        return [self._packed(each, run.cluster, name) for each in self._describer.blocks(request, run)]

    def _packed(self, block: Described, cluster: int, lora_name: str | None) -> bytes:
        hash_bytes = len(block.hashed)
        parent = b"" if block.parent is None else block.parent + block.key[hash_bytes:]
        group = self._describer.clusters[cluster].groups[0]
        try:
            extra = _extra(block, lora_name)
            return Descent(block.tokens, block.index, parent, hash_bytes, group, self._parts, self._whole, extra).pack()
        except (InvalidRequest, TypeError, ValueError):
            return b""  # more tokens or extra keys than a descent has room for, or keys that JSON does not know


def _extra(block: Described, lora_name: str | None) -> bytes:
    """Returns what the hash covers beside tokens. Raises TypeError or ValueError for what JSON does not know."""
    keys = to_event_extra_keys([block.extra_keys])
    said = {"lora_name": lora_name, "extra_keys": keys[0] if keys else None}
    said = {name: value for name, value in said.items() if value}
    return json.dumps(said, separators=(",", ":"), allow_nan=False).encode() if said else b""
