"""Headers of chunk files as events need them: parents, tokens, and the keys of engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.address import ADDRESS_BYTES, NO_PARENT, Address, block_address, chunk_address
from kvstore.census.walk import Fixed, read_fixed
from kvstore.errors import KVStoreError
from kvstore.events.columns import BlockName, Origin, Rows
from kvstore.events.inventory import Identities, Inventory
from kvstore.format import places
from kvstore.format.header import FIXED_BYTES, NO_WHOLE, PAGE_BYTES, VERSION_2, Damaged, Descent, Kind, decode_any
from kvstore.format.places import Name
from kvstore.namespace import Namespace
from kvstore.root.interface import Root
from kvstore.text import parse_json
from kvstore.tokens import token_array

# Claims of files about engine-hashed blocks, checked as far as possible.
#
# The address proves the key, and with it the engine's hash. Tokens, parent and extras are the writer's claim: a false
# one misleads routers of its own namespace, as a false event of an engine would, and no read.


LORA_NAME_MAX = 256
EXTRA_KEYS_MAX = 64
"""Extra keys of one block."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """One block: its identity, packed as those of chunks are, and its name."""

    packed: bytes
    """Address, parent's address, depth as u32 and tokens."""
    name: BlockName


def claimed_of(namespace: Namespace, address: Address, prefix: bytes) -> Claimed | None:
    """Returns what a file that begins with ``prefix`` says; None if it is not this block, or says nothing to tell."""
    try:
        header = decode_any(prefix)
    except Damaged:
        return None
    if header.kind is not Kind.BLOCK or (header.address, header.namespace) != (address, namespace.digest):
        return None
    descent = Descent.unpack(header.descent)
    key = header.identity
    if descent is None or not key or block_address(namespace, key) != address or descent.hash_bytes > len(key):
        return None
    name = _name(key, descent)
    if name is None or len(descent.tokens) != namespace.layout.chunk_tokens:
        return None
    parent = block_address(namespace, descent.parent) if descent.parent else NO_PARENT
    tokens = token_array(descent.tokens).tobytes()
    return Claimed(address + parent + descent.depth.to_bytes(4, "little") + tokens, name)


def _name(key: bytes, descent: Descent) -> BlockName | None:
    """Returns a block's name; None if its extras are not what routers understand."""
    try:
        extra = parse_json(descent.extra or b"{}")
    except ValueError:
        return None
    if not isinstance(extra, dict):
        return None
    lora_name = extra.get("lora_name")
    if not (lora_name is None or _is_text(lora_name, LORA_NAME_MAX)):
        return None
    keys = extra.get("extra_keys")
    if keys is not None and not (
        isinstance(keys, list) and 0 < len(keys) <= EXTRA_KEYS_MAX and all(map(_is_key, keys))
    ):
        return None
    if (descent.parts > 1) != (descent.whole != NO_WHOLE):
        return None
    origin = Origin(descent.group, lora_name, descent.parts, descent.whole)
    shared = None if keys is None else tuple(tuple(key) if isinstance(key, list) else key for key in keys)
    return BlockName(key, descent.hash_bytes, origin, shared)


def _is_key(value: Any) -> bool:
    """True for what extra keys of vLLM are: texts, numbers, and pairs of these."""
    if isinstance(value, list):
        return 0 < len(value) <= EXTRA_KEYS_MAX and all(map(_is_plain, value))
    return _is_plain(value)


def _is_plain(value: Any) -> bool:
    return value is None or _is_number(value) or _is_text(value)


def _is_number(value: Any) -> bool:
    """True for an integer that msgpack can encode."""
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 64


def _is_text(value: Any, size_max: int = 1 << 10) -> bool:
    """True for a text that is not too long and that UTF-8 can encode: JSON may escape half of a surrogate pair."""
    if not isinstance(value, str) or len(value) > size_max:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


# Identities of chunks, read from their files: parent, depth and tokens. Each once, while the file is there.
#
# Of a chunk of tokens nothing is believed that its address does not prove: it is the hash of parent and tokens. A
# block's address proves its key alone; the rest is what its writer says (``descent.py``).


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
