"""Identities of chunks, read from their files: parent, depth and tokens. Each once: it follows from the address.

Nothing of a header is believed that the address does not prove: it is the hash of parent and tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.address import ADDRESS_BYTES, NO_PARENT, Address, chunk_address
from kvstore.census.fixed import read_fixed
from kvstore.errors import KVStoreError
from kvstore.events.inventory import Identities, Inventory
from kvstore.events.table import Rows
from kvstore.format import places
from kvstore.format.header import FIXED_BYTES, Kind
from kvstore.namespace import Namespace
from kvstore.root.interface import Root

ROWS_MAX = 512
"""Files read between two looks for news."""


@dataclass(frozen=True, slots=True)
class Read:
    """One pass over some files."""

    found: Identities
    odd: Rows
    """Their files are no chunks of tokens that fit their names: blocks of engines, encrypted ones, damaged ones."""
    failed: Rows
    """The root did not answer: read them again."""


def read_identities(root: Root, shard_bits: int, namespace: Namespace, inventory: Inventory, rows: Rows) -> Read:
    """Reads the files of ``rows``; those that are gone are in no part of the answer."""
    size = FIXED_BYTES + 4 * namespace.layout.chunk_tokens
    packed, odd, failed = [], [], []
    for row, raw in zip(rows.tolist(), inventory.rows.addresses(rows), strict=True):
        address = Address(raw.tobytes())
        try:
            seen = root.look(places.chunk(address, namespace.id, shard_bits), size)
        except KVStoreError:
            failed.append(row)
            continue
        if seen is not None:
            identity = _identity(namespace, address, seen.prefix)
            if identity is None:
                odd.append(row)
            else:
                packed.append(address + identity)
    return Read(unpack(packed, namespace.layout.chunk_tokens), _rows(odd), _rows(failed))


def _identity(namespace: Namespace, address: Address, prefix: bytes) -> bytes | None:
    """Returns depth, parent and tokens, packed; None if the address is not theirs."""
    fixed = read_fixed(prefix)
    tokens = prefix[FIXED_BYTES:]
    if fixed is None or fixed.kind is not Kind.TOKENS or len(tokens) != 4 * namespace.layout.chunk_tokens:
        return None
    if chunk_address(namespace.digest, fixed.parent, tokens) != address:
        return None
    is_first = fixed.parent == NO_PARENT
    if is_first != (fixed.depth == 0):
        return None
    return fixed.parent + fixed.depth.to_bytes(4, "little") + tokens


def unpack(packed: list[bytes], chunk_tokens: int) -> Identities:
    """Makes columns of packed identities: address, parent, depth and tokens of each."""
    kind = np.dtype(
        [
            ("address", ">u8", 2),
            ("parent", ">u8", 2),
            ("depth", "<u4"),
            ("tokens", "<u4", (chunk_tokens,)),
        ]
    )
    assert kind.itemsize == 2 * ADDRESS_BYTES + 4 + 4 * chunk_tokens
    lines = np.frombuffer(b"".join(packed), kind)
    address, parent = lines["address"].astype(np.uint64), lines["parent"].astype(np.uint64)
    return Identities(
        address[:, 0], address[:, 1], parent[:, 0], parent[:, 1], lines["depth"], lines["tokens"].astype(np.uint32)
    )


def _rows(found: list[int]) -> Rows:
    return np.array(found, np.int32)
