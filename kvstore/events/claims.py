"""Claims of files about engine-hashed blocks, checked as far as possible.

The address proves the key, and with it the engine's hash. Tokens, parent and extras are the writer's claim: a false one
misleads routers of its own namespace, as a false event of an engine would, and no read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstore.address import NO_PARENT, Address, block_address
from kvstore.events.names import Name, Origin
from kvstore.format.descent import NO_WHOLE, Descent
from kvstore.format.encoded import decode_any
from kvstore.format.header import Damaged, Kind
from kvstore.namespace import Namespace
from kvstore.parsing import parse_json
from kvstore.tokens import token_array

LORA_NAME_MAX = 256
EXTRA_KEYS_MAX = 64
"""Extra keys of one block."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """One block: its identity, packed as those of chunks are, and its name."""

    packed: bytes
    """Address, parent's address, depth as u32 and tokens."""
    name: Name


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


def _name(key: bytes, descent: Descent) -> Name | None:
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
    return Name(key, descent.hash_bytes, origin, shared)


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
