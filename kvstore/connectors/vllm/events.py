"""KV events of the store, through the publisher of the engine, and what the files of blocks say for ``kvstore events``.

Only blocks of full attention are described, which every hit needs from the first on. Windows and recurrent states are
stored here and there: a router that counts a prompt's leading blocks would take their gaps, and their removal, for its
end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvstore.connectors.common import RecentMap
from kvstore.connectors.vllm.blocks import BlockRange, GroupKind, LayerGroups
from kvstore.connectors.vllm.messages import WorkerReport
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


# Descents: what the connector writes into the files of blocks, so that ``kvstore events`` can announce the blocks.
#
# An engine's own events announce what it stored and found missing. Only the store learns that a collector deleted a
# block, and it announces that by the same hash. Of several ranks the first one writes them.


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


# KV events: the connector announces the store's blocks to routers, through the publisher of the engine.
#
# It announces a block as stored when every rank has stored its part, and when the block was found and is loaded: then
# a router that receives only this engine's events knows the whole prefix. It announces a block as removed when a load
# fails, or when a look-up misses an announced block: so one request corrects a router after a collector's deletion.


MEDIUM = "STORAGE"
PENDING_MAX = 65_536
"""Blocks that are being stored and will be announced; beyond it, the oldest are not announced."""
ANNOUNCED_MAX = 262_144
"""Announced blocks that are remembered, for look-ups that miss them: about 60 MiB."""
ANNOUNCE_S = 2.0
"""The longest time that an engine without requests goes on stepping, to announce what it has just stored."""


@dataclass(slots=True)
class Block:
    """One block of a cluster. ``parts`` are those that are stored, as bits."""

    said: Described
    cluster: int
    origin: dict[str, Any]
    """The fields of events that name the request that stored or found it."""
    parts: int = 0

    def follows(self, other: Block) -> bool:
        """True if one event can have both."""
        is_alike = (self.cluster, self.origin) == (other.cluster, other.origin)
        return is_alike and self.said.parent == other.said.hashed


class Events:
    """The events of one engine. Used by the scheduler's thread alone.

    ``specs`` are the KV cache specs of vLLM's groups, and ``parts`` is the number of ``Shape``'s parts. Events name
    a cluster by its first group, whose number is in the keys.
    """

    def __init__(
        self,
        specs: Sequence[Any],
        describer: Describer,
        *,
        parts: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._specs = specs
        self._describer = describer
        self._all_parts = (1 << parts) - 1
        self._clock = clock
        self._pending: RecentMap[bytes, Block] = RecentMap(PENDING_MAX)
        self._pending_until_s = 0.0
        self._news: list[Block | tuple[int, bytes]] = []
        """Events to publish next: stored blocks, and group and hash of lost ones."""
        self._announced: RecentMap[bytes, None] = RecentMap(ANNOUNCED_MAX)
        self._hash_bytes = 0
        """Bytes of a block hash, with which a key begins (``block_key``); known with the first block."""

    def ordered(self, request: Any, runs: Iterable[BlockRange]) -> None:
        """Remembers blocks that the workers now store."""
        for key, block in self._blocks(request, runs):
            self._pending[key] = block
        self._pending_until_s = self._clock() + ANNOUNCE_S

    def found(self, request: Any, runs: Iterable[BlockRange]) -> None:
        """Announces these blocks, all of whose parts a look-up found."""
        for key, block in self._blocks(request, runs):
            self._announce(key, block)

    def missed(self, keys: Iterable[bytes]) -> None:
        """Announces as removed those of these blocks that were announced: a look-up or a load has missed them."""
        for key in keys:
            if key in self._announced:
                del self._announced[key]
                self._news.append((key[self._hash_bytes], key[: self._hash_bytes]))

    def learn(self, report: WorkerReport) -> None:
        """Takes in the workers' report: what they stored, what they could not store, and what they could not load."""
        self.missed(report.failed)
        for key in report.unstored:
            self._pending.pop(key, None)
        for key, parts in report.stored.items():
            block = self._pending.get(key)
            if block is not None:
                block.parts |= parts
                if block.parts == self._all_parts:
                    self._announce(key, self._pending.pop(key))

    def is_pending(self) -> bool:
        """True while there is something to announce soon, for which an idle engine should go on stepping."""
        return bool(self._news) or (bool(self._pending) and self._clock() < self._pending_until_s)

    def take(self) -> list[Any]:
        """Returns the events since the last call, in their order."""
        news, self._news = self._news, []
        events: list[Any] = []
        run: list[Block] = []
        """Blocks of one request that follow each other: one event."""
        for each in [*news, None]:
            if run and not (isinstance(each, Block) and each.follows(run[-1])):
                events.append(self._stored(run))
                run = []
            if isinstance(each, Block):
                run.append(each)
            elif each is not None:
                events.append(self._removed(*each))
        return events

    def _announce(self, key: bytes, block: Block) -> None:
        self._news.append(block)
        self._announced[key] = None

    def _blocks(self, request: Any, runs: Iterable[BlockRange]) -> Iterator[tuple[bytes, Block]]:
        """Yields the key and the name of each block to announce."""
        lora = request.lora_request
        origin = {
            "lora_id": None if lora is None else lora.adapter_id,
            "lora_name": None if lora is None else lora.name,
            "session_id": getattr(request, "session_id", None),  # the client's
        }
        for run in runs:
            for said in self._describer.blocks(request, run):
                self._hash_bytes = len(said.hashed)
                yield said.key, Block(said, run.cluster, origin)

    def _stored(self, blocks: Sequence[Block]) -> Any:
        first = blocks[0]
        cluster = self._describer.clusters[first.cluster]
        spec = self._specs[cluster.groups[0]]
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(each.said.hashed) for each in blocks],
            parent_block_hash=None if first.said.parent is None else maybe_convert_block_hash(first.said.parent),
            token_ids=[token for each in blocks for token in each.said.tokens],
            block_size=cluster.block_tokens,
            medium=MEDIUM,
            extra_keys=to_event_extra_keys([each.said.extra_keys for each in blocks]),
            group_idx=cluster.groups[0],
            kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
            kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
            **first.origin,
        )

    def _removed(self, group: int, hashed: bytes) -> Any:
        return BlockRemoved(
            block_hashes=[maybe_convert_block_hash(hashed)],
            medium=MEDIUM,
            group_idx=group,
        )
