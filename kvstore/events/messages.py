"""Batches of events as vLLM's ``vllm.distributed.kv_events`` encodes them: msgpack arrays, an event's name first.

Written out as lists here, because the store does not depend on vLLM; tests hold them against the installed engine.
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

Event = list[object]
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Naming:
    """How events name what they are about."""

    medium: str = MEDIUM
    whole_hashes: bool = False
    """True for the 16 bytes of an address, False for its low 64 bits as a number."""

    def hashes(self, inventory: Inventory, rows: Rows) -> list[int] | list[bytes]:
        """Returns the hash of each row."""
        if self.whole_hashes:
            return [line.tobytes() for line in inventory.addresses(rows)]
        return inventory.hashes(rows)


def encoded(events: Sequence[Event], now_s: float) -> bytes:
    """Returns one batch; ``now_s`` is its time in seconds since the epoch."""
    return _encode([now_s, events, DATA_PARALLEL_RANK])


def cleared() -> Event:
    """The marker: forget everything of this publisher, a snapshot follows."""
    return ["AllBlocksCleared"]


def removed(inventory: Inventory, rows: Rows, naming: Naming, blocks_max: int) -> Iterator[list[Event]]:
    """Yields the events of batches that say that rows are gone."""
    for start in range(0, len(rows), blocks_max):
        yield [["BlockRemoved", naming.hashes(inventory, rows[start : start + blocks_max]), naming.medium]]


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
    above = inventory.parents(chain[:1])
    parent = None if above[0] == NO_ROW else naming.hashes(inventory, above)[0]
    tokens = inventory.tokens.read(chain)
    hashes, size = naming.hashes(inventory, chain), inventory.tokens.width
    return ["BlockStored", hashes, parent, tokens.ravel().tolist(), size, None, naming.medium, None]


def _chains(inventory: Inventory, rows: Rows) -> list[Rows]:
    """Cuts rows into chains, each row the child of the one before it; a chain comes after the one it hangs from."""
    ends: dict[int, list[int]] = {}
    chains: list[list[int]] = []
    for row, parent in zip(rows.tolist(), inventory.parents(rows).tolist(), strict=True):
        chain = ends.pop(parent, None)
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(row)
        ends[row] = chain
    # The first rows of chains are in the order of depths. The parent of such a row is less deep, and so in a chain that
    # begins above it.
    return [np.array(chain, np.int32) for chain in chains]
