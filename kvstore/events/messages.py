"""Batches of events as ``vllm.distributed.kv_events`` of vLLM 0.32 encodes them, in msgpack.

A batch is an array, an event a map with its type. Written out here, because the store does not depend on vLLM; tests
hold them against the installed engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvstore.events.inventory import Inventory
from kvstore.events.table import NO_ROW, Rows

MEDIUM = "STORAGE"
"""Dynamo's indexer counts it if ``locality`` is unset, which the form of these messages has no field for."""
DATA_PARALLEL_RANK = 0

Event = dict[str, object]
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Naming:
    """How events name what they are about."""

    medium: str = MEDIUM
    whole_hashes: bool = False
    """True for the 16 bytes of an address, or an engine's whole hash; False for its low 64 bits as a number."""

    def hashes(self, inventory: Inventory, rows: Rows) -> list[int] | list[bytes]:
        """Returns the hash of each row."""
        if self.whole_hashes:
            return inventory.rows.whole_hashes(rows)
        return inventory.rows.hashes(rows)


def encoded(events: Sequence[Event], now_s: float) -> bytes:
    """Returns one batch; ``now_s`` is its time in seconds since the epoch."""
    return _encode([now_s, events, DATA_PARALLEL_RANK])


def cleared() -> Event:
    """The marker: forget everything of this publisher, a snapshot follows."""
    return {"type": "AllBlocksCleared"}


def removed(inventory: Inventory, rows: Rows, naming: Naming, blocks_max: int) -> Iterator[list[Event]]:
    """Yields the events of batches that say that rows are gone."""
    for start in range(0, len(rows), blocks_max):
        gone = naming.hashes(inventory, rows[start : start + blocks_max])
        yield [{"type": "BlockRemoved", "block_hashes": gone, "medium": naming.medium}]


def stored(inventory: Inventory, rows: Rows, naming: Naming, blocks_max: int) -> Iterator[list[Event]]:
    """Yields the events of batches that say that rows are there; ``rows`` has parents before their children."""
    events: list[Event] = []
    count = 0
    for chain in _chains(inventory, rows):
        for start in range(0, len(chain), blocks_max):
            part = chain[start : start + blocks_max]
            if count and count + len(part) > blocks_max:
                yield events
                events, count = [], 0
            events.append(_stored(inventory, part, naming))
            count += len(part)
    if events:
        yield events


def _stored(inventory: Inventory, chain: Rows, naming: Naming) -> Event:
    above = inventory.rows.parents[chain[:1]]
    parent = None if above[0] == NO_ROW else naming.hashes(inventory, above)[0]
    tokens = inventory.rows.tokens.read(chain)
    event: Event = {
        "type": "BlockStored",
        "block_hashes": naming.hashes(inventory, chain),
        "parent_block_hash": parent,
        "token_ids": tokens.ravel().tolist(),
        "block_size": inventory.rows.tokens.width,
        "lora_id": None,
        "medium": naming.medium,
        "lora_name": None,
    }
    if inventory.rows.is_block(int(chain[0])):
        event |= _of_engine(inventory, chain)
    return event


def _of_engine(inventory: Inventory, chain: Rows) -> Event:
    """Returns what an event says of blocks that an engine hashed, beside hashes and tokens."""
    names = inventory.rows.names
    assert names is not None
    origin, extra_keys = names.origin(int(chain[0])), names.extra_keys(chain)
    return {
        "lora_name": origin.lora_name,
        "extra_keys": extra_keys if any(each is not None for each in extra_keys) else None,
        "group_idx": origin.group,
    }


def _chains(inventory: Inventory, rows: Rows) -> list[Rows]:
    """Cuts rows into chains, each row the child of the one before it; a chain comes after the one it hangs from.

    All rows of a chain have one origin.
    """
    ends: dict[tuple[int, int], list[int]] = {}
    chains: list[list[int]] = []
    origins = inventory.rows.origins(rows).tolist()
    for row, parent, origin in zip(rows.tolist(), inventory.rows.parents[rows].tolist(), origins, strict=True):
        chain = ends.pop((parent, origin), None)
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(row)
        ends[row, origin] = chain
    # The first rows of chains are in the order of depths. The parent of such a row is less deep, and so in a chain that
    # begins above it.
    return [np.array(chain, np.int32) for chain in chains]
