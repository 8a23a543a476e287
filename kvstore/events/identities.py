"""Identities of chunks, read from their files: parent, depth and tokens. Each once, while the file is there.

Of a chunk of tokens nothing is believed that its address does not prove: it is the hash of parent and tokens. A block's
address proves its key alone; the rest is what its writer says (``descent.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.address import ADDRESS_BYTES, NO_PARENT, Address, chunk_address
from kvstore.census.fixed import Fixed, read_fixed
from kvstore.errors import KVStoreError
from kvstore.events.claims import Claimed, claimed_of
from kvstore.events.inventory import Identities, Inventory
from kvstore.events.names import Name as BlockName
from kvstore.events.table import Rows
from kvstore.format import places
from kvstore.format.encoded import VERSION_2
from kvstore.format.header import FIXED_BYTES, PAGE_BYTES, Kind
from kvstore.format.places import Name
from kvstore.namespace import Namespace
from kvstore.root.interface import Root

ROWS_MAX = 512
"""Files read between two looks for news."""


@dataclass(frozen=True, slots=True)
class Read:
    """One pass over some files."""

    found: Identities
    blocks: Identities
    odd: Rows
    """Their files say nothing that fits their names, or that can be told: encrypted or damaged ones, and blocks without
    a descent."""
    failed: Rows
    """The root did not answer: read them again."""


def read_identities(root: Root, shard_bits: int, namespace: Namespace, inventory: Inventory, rows: Rows) -> Read:
    """Reads the files of ``rows``; those that are gone are in no part of the answer."""
    packed, blocks, odd, failed = list[bytes](), list[Claimed](), [], []
    for row, raw in zip(rows.tolist(), inventory.rows.addresses(rows), strict=True):
        address = Address(raw.tobytes())
        try:
            seen = _seen(root, places.chunk(address, namespace.id, shard_bits), namespace)
        except KVStoreError:
            failed.append(row)
            continue
        if seen is None:
            continue
        prefix, fixed = seen
        if fixed is not None and fixed.kind is Kind.BLOCK:
            claimed = claimed_of(namespace, address, prefix)
            blocks += [claimed] if claimed is not None else []
            odd += [row] if claimed is None else []
        elif fixed is not None and (identity := _identity(namespace, address, fixed, prefix)) is not None:
            packed.append(address + identity)
        else:
            odd.append(row)
    size = namespace.layout.chunk_tokens
    told = unpack([each.packed for each in blocks], size, [each.name for each in blocks])
    return Read(unpack(packed, size), told, _rows(odd), _rows(failed))


def _seen(root: Root, name: Name, namespace: Namespace) -> tuple[bytes, Fixed | None] | None:
    """Returns the first bytes of a file, at least what identifies a chunk and a block's header; None: there is none."""
    size = max(FIXED_BYTES + 4 * namespace.layout.chunk_tokens, PAGE_BYTES)
    seen = root.look(name, size)
    if seen is None:
        return None
    fixed = read_fixed(seen.prefix)
    if fixed is not None and fixed.kind is Kind.BLOCK and fixed.version == VERSION_2 and size < 2 * PAGE_BYTES:
        seen = root.look(name, 2 * PAGE_BYTES)
    return None if seen is None else (seen.prefix, fixed)


def _identity(namespace: Namespace, address: Address, fixed: Fixed, prefix: bytes) -> bytes | None:
    """Returns parent, depth and tokens, packed; None if the address is not theirs."""
    size = 4 * namespace.layout.chunk_tokens
    tokens = prefix[FIXED_BYTES : FIXED_BYTES + size]
    if len(tokens) != size or chunk_address(namespace.digest, fixed.parent, tokens) != address:
        return None
    is_first = fixed.parent == NO_PARENT
    if is_first != (fixed.depth == 0):
        return None
    return fixed.parent + fixed.depth.to_bytes(4, "little") + tokens


def unpack(packed: list[bytes], chunk_tokens: int, names: Sequence[BlockName] = ()) -> Identities:
    """Makes columns of packed identities: address, parent, depth and tokens of each; ``names`` are those of blocks."""
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
        address[:, 0],
        address[:, 1],
        parent[:, 0],
        parent[:, 1],
        lines["depth"],
        lines["tokens"].astype(np.uint32),
        names,
    )


def _rows(found: list[int]) -> Rows:
    return np.array(found, np.int32)
