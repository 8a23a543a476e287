"""A bit that flips in a request is an error: never another prompt, another block, or another pin."""

from __future__ import annotations

import numpy as np
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.transport.messages import SEAL_BYTES, SEAL_FIELD, pack_keys, pack_tokens, parse, sealed
from kvstore.transport.status import BrokenTransfer
from kvstore.v1 import kvstore_pb2 as pb
from tests.kit.cases import for_each

TOKENS = pack_tokens(np.random.default_rng(1).integers(0, 1 << 32, 256, dtype=np.uint32))
REQUESTS: list[Message] = [
    pb.PutStart(namespace=b"n" * 32, tokens=TOKENS, first=3),  # over a bulk connection
    pb.GetRequest(namespace=b"n" * 32, tokens=TOKENS, chunks_max=2),
    pb.PinRequest(namespace=b"n" * 32, tokens=TOKENS),
    pb.GetRequest(namespace=b"n" * 32, keys=pack_keys([b"k" * 32, b"l" * 32]), sizes=b"\0" * 8),
    pb.ClearRequest(),
]


@for_each("request_", REQUESTS)
def test_a_request_is_what_was_sent_or_refused_whichever_bit_flips(request_: Message) -> None:
    raw = sealed(request_)
    refused = 0
    for bit in range(8 * len(raw)):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            found = parse(type(request_), bytes(changed))
        except (BrokenTransfer, InvalidRequest):
            refused += 1
        else:
            found.DiscardUnknownFields()
            assert found == request_, f"bit {bit} made another request"
    assert refused >= 8 * (len(raw) - SEAL_BYTES)


@given(st.binary(max_size=64), st.integers(0, 2**64 - 1))
def test_a_request_without_a_seal_is_taken_whatever_its_bytes_look_like(begin: bytes, end: int) -> None:
    """Another client may leave seals out, and its tokens may end as a seal would."""
    tokens = begin + b"\xf9\x7f" + end.to_bytes(8, "little")
    message = pb.MatchRequest(namespace=b"n" * 32, tokens=tokens)
    assert parse(pb.MatchRequest, message.SerializeToString()) == message
    assert parse(pb.MatchRequest, sealed(message)).tokens == tokens


def test_a_seal_is_a_field_that_nobody_declares() -> None:
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        assert SEAL_FIELD not in message.fields_by_number
