"""The wire: images in messages, keys and sizes, errors as statuses and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from kvstore import errors
from kvstore.core.namespace import Namespace
from kvstore.errors import HoldBroken, InvalidRequest, KVStoreError
from kvstore.format.header import DESCENT_BYTES_MAX, Expected, expected_block
from kvstore.transport import status
from kvstore.transport.images import image_messages, receive_images
from kvstore.transport.limits import DESCENTS_BYTES_MAX
from kvstore.transport.messages import (
    SEAL_BYTES,
    SEAL_FIELD,
    namespace_of,
    pack_descents,
    pack_keys,
    pack_sizes,
    pack_tokens,
    parse,
    sealed,
    unpack_descents,
    unpack_keys,
    unpack_sizes,
    unpack_tokens,
)
from kvstore.transport.status import BrokenTransfer, failure, refusal
from kvstore.v1 import kvstore_pb2 as pb
from tests.kit.cases import for_each
from tests.kit.stores import SMALL


def expected_of_size(size_bytes: int) -> Expected:
    return expected_block(Namespace.of("m", SMALL), b"k" * 16, size_bytes)


def sent(block: bytes, cut: int) -> list[pb.GetResponse]:
    """The messages of a block's image, with ``cut`` bytes in each."""
    made = image_messages(pb.GetResponse, 3, expected_of_size(len(block)), [memoryview(block)])
    image = b"".join(pb.GetResponse.FromString(message).data for message in made)
    return [pb.GetResponse(index=3, data=image[at : at + cut]) for at in range(0, len(image), cut)]


def received(messages: list[pb.GetResponse], size_bytes: int) -> bytes:
    memory = bytearray(size_bytes)
    target = (expected_of_size(size_bytes), [memoryview(memory)])
    assert list(receive_images(iter(messages), lambda _: target)) == [3]
    return bytes(memory)


@given(st.binary(min_size=1, max_size=300), st.integers(1, 5000))
def test_image_cut_anywhere_arrives(block: bytes, cut: int) -> None:
    assert received(sent(block, cut), len(block)) == block


@given(st.binary(min_size=1, max_size=50), st.integers(0))
def test_image_with_flipped_bit_is_refused(block: bytes, where: int) -> None:
    (message,) = sent(block, 1 << 20)
    data = bytearray(message.data)
    data[where % len(data)] ^= 1
    with pytest.raises(BrokenTransfer, match="image 3 changed on the way"):
        received([pb.GetResponse(index=3, data=bytes(data))], len(block))


@given(st.lists(st.binary(min_size=16, max_size=64), max_size=10))
def test_keys_and_sizes_there_and_back(keys: list[bytes]) -> None:
    assert unpack_keys(pack_keys(keys)) == keys
    sizes = [1 + len(key) * 1000 for key in keys]
    assert unpack_sizes(pack_sizes(sizes), len(keys)) == sizes


PLAIN = pb.Layout(layers=1, kv_heads=1, head_dim=1, dtype="int8", chunk_tokens=1)
TWICE = [pb.Attribute(name="a", value="1"), pb.Attribute(name="a", value="2")]
REJECTED: list[tuple[Callable[[Any], object], Any, str]] = [
    (unpack_keys, b"\x0f" + bytes(15), "key 0 claims"),
    (unpack_keys, b"\x41" + bytes(65), "key 0 claims"),
    (unpack_keys, b"\x10" + bytes(15), "key 0 claims"),
    (unpack_keys, (b"\x10" + bytes(16)) * 65_537, "more than 65536 blocks"),
    (unpack_tokens, bytes(4 * 4_194_305), "over the limit of 4194304"),
    (unpack_tokens, bytes(5), "5 bytes: expected 4 for each"),
    (lambda packed: unpack_sizes(packed, 1), bytes(4), "has 0 bytes"),
    (lambda packed: unpack_sizes(packed, 1), bytes(3), "3 bytes"),
    (lambda packed: unpack_sizes(packed, 1), b"\xff" * 4, "4294967"),
    (lambda packed: unpack_descents(packed, 1), pack_descents([bytes(DESCENT_BYTES_MAX + 1)]), "at most 3584"),
    (lambda packed: unpack_descents(packed, 1), bytes(DESCENTS_BYTES_MAX + 1), "over the limit"),
    (namespace_of, pb.Namespace(name="m"), "no layout"),
    (namespace_of, pb.Namespace(name="m", layout=pb.Layout(layers=1)), "kv_heads=0"),
    (namespace_of, pb.Namespace(layout=PLAIN), "is empty"),
    (namespace_of, pb.Namespace(name="m", layout=PLAIN, attributes=TWICE), "twice"),
]


@for_each("call, given, says", REJECTED)
def test_invalid_field_of_a_request_is_refused(call: Callable[[Any], object], given: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        call(given)


# Errors

PUBLIC = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, KVStoreError) and kind is not KVStoreError
]


def round_trip(error: KVStoreError) -> KVStoreError:
    refused = refusal(error)
    return failure(refused.code, refused.message, refused.trailers, "here").error


def test_the_table_has_every_error() -> None:
    assert set(PUBLIC) <= set(status.STATUSES)


@for_each("kind", list(status.STATUSES))
def test_errors_come_back_as_the_same_class_with_the_same_message(kind: type[KVStoreError]) -> None:
    back = round_trip(kind("what was wrong, größer als erlaubt"))
    assert type(back) is kind
    assert str(back) == "what was wrong, größer als erlaubt"


def test_a_broken_hold_says_what_is_still_valid() -> None:
    back = round_trip(HoldBroken("a chunk was lost", 512))
    assert isinstance(back, HoldBroken)
    assert back.tokens_valid == 512


def test_a_long_message_is_cut() -> None:
    assert len(refusal(InvalidRequest("x" * 100_000)).message) == status.MESSAGE_BYTES_MAX
    assert len(quote(refusal(InvalidRequest("é💥" * 100_000)).message)) <= status.MESSAGE_BYTES_MAX


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_descents_arrive_as_they_were_sent(descents: list[bytes]) -> None:
    assert unpack_descents(pack_descents(descents), len(descents)) == (descents if any(descents) else [])


PACKED = pack_tokens(np.random.default_rng(1).integers(0, 1 << 32, 256, dtype=np.uint32))
REQUESTS: list[Message] = [
    pb.PutStart(namespace=b"n" * 32, tokens=PACKED, first=3),  # over a bulk connection
    pb.GetRequest(namespace=b"n" * 32, tokens=PACKED, chunks_max=2),
    pb.PinRequest(namespace=b"n" * 32, tokens=PACKED),
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
