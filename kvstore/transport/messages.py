"""Converts our values to messages and back. Everything from the network is checked here, once."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeVar, cast

import numpy as np
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from kvstore.core import tracing
from kvstore.core.address import BLOCK_KEY_BYTES_MAX, BLOCK_KEY_BYTES_MIN, TOKENS_MAX, TokenArray
from kvstore.core.layout import DType, Layout
from kvstore.core.namespace import Namespace
from kvstore.core.recency import Hints
from kvstore.core.results import PinRecord
from kvstore.core.write_mode import WriteMode
from kvstore.errors import InvalidRequest
from kvstore.format.header import DESCENT_BYTES_MAX, checksum
from kvstore.transport.limits import BLOCK_BYTES_MAX, BLOCKS_MAX, DESCENTS_BYTES_MAX
from kvstore.transport.status import BrokenTransfer
from kvstore.v1 import kvstore_pb2 as pb

M = TypeVar("M", bound=Message)

SEAL_FIELD = 2047
"""The seal is the XXH3-64 of a message's other fields: a bit that flips on the way makes no other prompt of it.

TCP's checksum of 16 bits misses some damage. Checksums reveal it in the bytes of a chunk. In the tokens of a put it
would store one prompt's KV under another's address, with all checksums right. The field is fixed64 and no message
declares it, so a receiver that does not know it ignores it, and a sender may omit it.
"""
_SEAL_TAG = b"\xf9\x7f"
"""Field 2047, wire type 1 (64 bits)."""
_SEAL_SUM = struct.Struct("<Q")
SEAL_BYTES = len(_SEAL_TAG) + _SEAL_SUM.size
_TRACE_TAG = b"\xf2\x7f"
"""Field 2046, wire type 2 (a length and so many bytes): the trace of a request on a bulk connection, which over gRPC
travels in metadata. It is at the front of the message, no message declares it, and the seal covers it.
"""
TRACE_BYTES_MAX = 127
"""One byte of length. The longest id and span take 124."""
_LONG = {"i": tracing.REQUEST_ID_KEY, "p": tracing.PARENT_KEY}
_SHORT = {key: short for short, key in _LONG.items()}
TOKEN_BYTES = 4
PROMPTS_MAX = 65_536
_WRITES: dict[WriteMode | None, pb.Write] = {
    None: pb.WRITE_UNSPECIFIED,
    WriteMode.THROUGH: pb.WRITE_THROUGH,
    WriteMode.BEHIND: pb.WRITE_BEHIND,
    WriteMode.UNCACHED: pb.WRITE_UNCACHED,
}


def seal(content: bytes) -> bytes:
    """Returns the field that seals ``content``: its XXH3-64."""
    return _SEAL_TAG + _SEAL_SUM.pack(checksum(content))


def is_whole(message: bytes) -> bool | None:
    """True if a message matches the seal at its end; None if it has none."""
    at = len(message) - SEAL_BYTES
    if at < 0 or message[at : at + len(_SEAL_TAG)] != _SEAL_TAG:
        return None
    return seal(message[:at]) == message[at:]


def sealed(message: Message) -> bytes:
    """Encodes a request with a seal, which shows a byte that changes on the way."""
    raw: bytes = message.SerializeToString()
    return raw + seal(raw)


def traced(message: Message) -> bytes:
    """Encodes a request with a seal, and with the trace of the calling thread."""
    said = " ".join(f"{_SHORT[key]}={value}" for key, value in tracing.metadata() if key in _SHORT).encode()
    raw: bytes = message.SerializeToString()
    if said:
        raw = b"".join((_TRACE_TAG, bytes((len(said),)), said, raw))
    return raw + seal(raw)


def trace_of(message: bytes) -> tracing.Metadata:
    """Returns the trace as metadata; empty if there is none, or if it is invalid."""
    at = len(_TRACE_TAG) + 1
    if message[: len(_TRACE_TAG)] != _TRACE_TAG or len(message) < at or message[at - 1] > TRACE_BYTES_MAX:
        return ()
    try:
        said = message[at : at + message[at - 1]].decode("ascii")
    except UnicodeDecodeError:
        return ()
    pairs = [word.partition("=") for word in said.split(" ")]
    return tuple((_LONG[key], value) for key, _, value in pairs if value and key in _LONG)


def parse(kind: type[M], raw: bytes) -> M:
    """Decodes a message, sealed or not.

    Raises InvalidRequest if it is not of this kind, BrokenTransfer if it does not match its seal.
    """
    verdict = is_whole(raw)
    try:
        found = kind.FromString(raw)
    except DecodeError as cause:
        if verdict is False:
            raise BrokenTransfer("a request changed on the way: repeat the call") from cause
        raise InvalidRequest(f"the request is not a {kind.DESCRIPTOR.full_name}: {cause}") from cause
    if verdict is False:
        # The last bytes of a message without a seal may look like a seal by chance.
        unknown = UnknownFieldSet(found)
        if any(unknown[at].field_number == SEAL_FIELD for at in range(len(unknown))):
            raise BrokenTransfer("a request changed on the way: repeat the call")
    return found


def namespace_message(namespace: Namespace) -> pb.Namespace:
    """Converts a namespace to a message."""
    return pb.Namespace(
        name=namespace.name,
        layout=pb.Layout(**namespace.layout.to_dict()),
        fingerprint=namespace.fingerprint,
        tenant=namespace.tenant,
        attributes=[pb.Attribute(name=name, value=value) for name, value in namespace.attributes],
    )


def namespace_of(message: pb.Namespace) -> Namespace:
    """Converts a message to a namespace. Raises InvalidRequest if it does not describe one."""
    if not message.HasField("layout"):
        raise InvalidRequest("the namespace has no layout: expected layers, kv_heads, head_dim, dtype and chunk_tokens")
    layout = message.layout
    attributes = {each.name: each.value for each in message.attributes}
    if len(attributes) != len(message.attributes):
        raise InvalidRequest("an attribute of the namespace occurs twice: expected each name once")
    return Namespace.of(
        message.name,
        Layout(layout.layers, layout.kv_heads, layout.head_dim, cast("DType", layout.dtype), layout.chunk_tokens),
        message.fingerprint,
        message.tenant,
        attributes,
    )


def hints_message(hints: Hints) -> pb.Hints:
    """Converts hints to a message."""
    return pb.Hints(priority=hints.priority, ttl_s=hints.ttl_s or 0)


def hints_of(message: pb.Hints) -> Hints:
    """Converts a message to hints, an absent message too. Raises InvalidRequest."""
    return Hints.of(message.priority if message.HasField("priority") else None, message.ttl_s or None)


def write_message(write: WriteMode | None) -> pb.Write:
    """Converts a write mode to its value on the wire; None is the worker's own mode."""
    return _WRITES[write]


def write_of(message: int) -> WriteMode | None:
    """Converts a value on the wire to a write mode. Raises InvalidRequest."""
    for write, sent in _WRITES.items():
        if sent == message:
            return write
    raise InvalidRequest(f"write is {message}: expected WRITE_THROUGH (1), WRITE_BEHIND (2) or WRITE_UNCACHED (3)")


def pack_tokens(tokens: TokenArray) -> bytes:
    """Encodes token ids as little-endian u32."""
    return tokens.astype("<u4", copy=False).tobytes()


def unpack_tokens(packed: bytes) -> TokenArray:
    """Decodes token ids, without a copy. Raises InvalidRequest for part of a token, or too many."""
    if len(packed) % TOKEN_BYTES:
        raise InvalidRequest(f"tokens have {len(packed)} bytes: expected 4 for each, an unsigned little-endian integer")
    if len(packed) > TOKEN_BYTES * TOKENS_MAX:
        raise InvalidRequest(
            f"{len(packed) // TOKEN_BYTES} tokens are over the limit of {TOKENS_MAX}: split the prompt"
        )
    return np.frombuffer(packed, dtype="<u4")


def pack_prompts(prompts: Sequence[TokenArray]) -> dict[str, bytes]:
    """Encodes several prompts as the fields ``tokens`` and ``lengths``."""
    lengths = np.array([len(tokens) for tokens in prompts], "<u4").tobytes()
    return {"tokens": b"".join(map(pack_tokens, prompts)), "lengths": lengths}


def unpack_prompts(packed: bytes, packed_lengths: bytes) -> list[TokenArray]:
    """Decodes several prompts. Raises InvalidRequest as ``unpack_tokens``, or if the lengths do not fit."""
    tokens = unpack_tokens(packed)
    if len(packed_lengths) % 4 or len(packed_lengths) > 4 * PROMPTS_MAX:
        raise InvalidRequest(
            f"lengths have {len(packed_lengths)} bytes: expected 4 for each prompt, and at most {PROMPTS_MAX} prompts"
        )
    ends = np.cumsum(np.frombuffer(packed_lengths, "<u4").astype(np.int64)).tolist()
    if not ends or ends[-1] != len(tokens):
        raise InvalidRequest(f"the lengths sum to {ends[-1] if ends else 0}: expected {len(tokens)}, the tokens sent")
    return [tokens[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def pack_counts(counts: Sequence[int]) -> bytes:
    """Encodes leading chunks of several prompts as little-endian u32."""
    return np.array(counts, "<u4").tobytes()


def unpack_counts(packed: bytes, most: int) -> list[int]:
    """Decodes leading chunks of at most ``most`` prompts; a part of a count is left out."""
    counts: list[int] = np.frombuffer(packed, "<u4", min(most, len(packed) // 4)).tolist()
    return counts


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """Encodes block keys, each behind a byte with its length."""
    return b"".join(piece for key in keys for piece in (len(key).to_bytes(1), key))


def unpack_keys(packed: bytes) -> list[bytes]:
    """Decodes block keys. Raises InvalidRequest for a key of another length than 16 to 64, or too many."""
    keys: list[bytes] = []
    at = 0
    while at < len(packed):
        size = packed[at]
        key = packed[at + 1 : at + 1 + size]
        if not BLOCK_KEY_BYTES_MIN <= size <= BLOCK_KEY_BYTES_MAX or len(key) != size:
            raise InvalidRequest(
                f"key {len(keys)} claims {size} bytes, and {len(key)} came: expected a length byte, "
                f"{BLOCK_KEY_BYTES_MIN} to {BLOCK_KEY_BYTES_MAX}, and then the key"
            )
        keys.append(key)
        if len(keys) > BLOCKS_MAX:
            raise InvalidRequest(f"more than {BLOCKS_MAX} blocks in one call: split it")
        at += 1 + size
    return keys


def pack_sizes(sizes: Sequence[int]) -> bytes:
    """Encodes sizes of blocks as little-endian u32."""
    return np.asarray(sizes, dtype="<u4").tobytes()


def unpack_sizes(packed: bytes, count: int) -> list[int]:
    """Decodes sizes of blocks. Raises InvalidRequest unless there are ``count`` of them, each from 1 byte to 1 GiB."""
    if len(packed) != 4 * count:
        raise InvalidRequest(f"sizes have {len(packed)} bytes: expected {4 * count}, 4 for each of {count} keys")
    sizes: list[int] = np.frombuffer(packed, dtype="<u4").tolist()
    for position, size in enumerate(sizes):
        if not 1 <= size <= BLOCK_BYTES_MAX:
            raise InvalidRequest(f"block {position} has {size} bytes: expected 1 to {BLOCK_BYTES_MAX}")
    return sizes


def pack_descents(descents: Sequence[bytes]) -> bytes:
    """Encodes the packed descents of blocks, each behind its size as a little-endian u16; empty if none has one."""
    if not any(descents):
        return b""
    return b"".join(piece for each in descents for piece in (len(each).to_bytes(2, "little"), each))


def unpack_descents(packed: bytes, count: int) -> list[bytes]:
    """Decodes the descents of ``count`` blocks, or of none. Raises InvalidRequest for other sizes than these.

    Their content is not checked: a reader of the file cannot trust it either.
    """
    if len(packed) > DESCENTS_BYTES_MAX:
        raise InvalidRequest(f"{len(packed)} bytes of descents are over the limit of {DESCENTS_BYTES_MAX}: split it")
    descents: list[bytes] = []
    at = 0
    while at < len(packed):
        size = int.from_bytes(packed[at : at + 2], "little")
        descents.append(packed[at + 2 : at + 2 + size])
        at += 2 + size
        if size > DESCENT_BYTES_MAX or at > len(packed) or len(descents) > count:
            break
    if at != len(packed) or len(descents) not in (0, count) or any(len(each) > DESCENT_BYTES_MAX for each in descents):
        raise InvalidRequest(
            f"expected {count} descents, or none: for each its size in two bytes, at most {DESCENT_BYTES_MAX}, and "
            "then its bytes"
        )
    return descents


def pin_message(pin: PinRecord) -> pb.PinRecord:
    """Converts a pin to a message."""
    return pb.PinRecord(id=pin.id, owner=pin.owner, namespace=pin.namespace, tokens=pin.tokens, expires_s=pin.expires_s)


def pin_of(message: pb.PinRecord) -> PinRecord:
    """Converts a message to a pin."""
    return PinRecord(message.id, message.owner, message.namespace, message.tokens, message.expires_s)
