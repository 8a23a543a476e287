"""The wire: images in messages, keys and sizes, errors as statuses and back."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import errors
from kvstore.errors import HoldBroken, InvalidRequest, KVStoreError
from kvstore.format.header import DESCENT_BYTES_MAX, Expected, expected_block
from kvstore.namespace import Namespace
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import statuses
from kvstore.wire.images import image_messages, receive_images
from kvstore.wire.limits import DESCENTS_BYTES_MAX, MESSAGE_BYTES_MAX
from kvstore.wire.messages import (
    namespace_message,
    namespace_of,
    pack_descents,
    pack_keys,
    pack_sizes,
    unpack_descents,
    unpack_keys,
    unpack_sizes,
    unpack_tokens,
)
from kvstore.wire.statuses import BrokenTransfer, failure, refusal
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


def test_messages_of_large_image_stay_under_the_limit() -> None:
    block = memoryview(bytes(9 << 20))
    messages = list(image_messages(pb.PutRequest, 0, expected_of_size(len(block)), [block]))
    assert len(messages) > 2
    assert max(map(len, messages)) <= MESSAGE_BYTES_MAX
    assert sum(len(pb.PutRequest.FromString(message).data) for message in messages) == 4096 + len(block)


@given(st.binary(min_size=1, max_size=50), st.integers(0))
def test_image_with_flipped_bit_is_refused(block: bytes, where: int) -> None:
    (message,) = sent(block, 1 << 20)
    data = bytearray(message.data)
    data[where % len(data)] ^= 1
    with pytest.raises(BrokenTransfer, match="image 3 changed on the way"):
        received([pb.GetResponse(index=3, data=bytes(data))], len(block))


@for_each(
    "change, says",
    [
        (lambda messages: messages[:-1], "ended within image 3"),
        (lambda messages: [messages[0], pb.GetResponse(index=4, data=b"x")], "ended within image 3"),
        (lambda messages: [*messages[:-1], pb.GetResponse(index=3, data=messages[-1].data + b"xy")], "2 bytes more"),
        (lambda _: [pb.GetResponse(index=3, data=bytes(MESSAGE_BYTES_MAX + 1))], "over the limit of 4194304"),
    ],
)
def test_stream_of_wrong_length_is_refused(change: Callable[..., list[pb.GetResponse]], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        received(change(sent(b"block", 4096)), 5)


@given(st.lists(st.binary(min_size=16, max_size=64), max_size=10))
def test_keys_and_sizes_there_and_back(keys: list[bytes]) -> None:
    assert unpack_keys(pack_keys(keys)) == keys
    sizes = [1 + len(key) * 1000 for key in keys]
    assert unpack_sizes(pack_sizes(sizes), len(keys)) == sizes


@for_each("packed", [b"\x0f" + bytes(15), b"\x41" + bytes(65), b"\x10" + bytes(15), b"\x00"])
def test_keys_that_are_none(packed: bytes) -> None:
    with pytest.raises(InvalidRequest, match="key 0 claims"):
        unpack_keys(packed)


def test_too_many_keys_and_tokens() -> None:
    with pytest.raises(InvalidRequest, match="more than 65536 blocks"):
        unpack_keys((b"\x10" + bytes(16)) * 65_537)
    with pytest.raises(InvalidRequest, match="over the limit of 4194304"):
        unpack_tokens(bytes(4 * 4_194_305))
    with pytest.raises(InvalidRequest, match="5 bytes: expected 4 for each"):
        unpack_tokens(bytes(5))


@for_each("packed, says", [(bytes(4), "has 0 bytes"), (bytes(3), "3 bytes"), (b"\xff" * 4, "4294967")])
def test_sizes_that_are_none(packed: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        unpack_sizes(packed, 1)


@for_each(
    "message, says",
    [
        (pb.Namespace(name="m"), "no layout"),
        (pb.Namespace(name="m", layout=pb.Layout(layers=1)), "kv_heads=0"),
        (pb.Namespace(layout=pb.Layout(layers=1, kv_heads=1, head_dim=1, dtype="int8", chunk_tokens=1)), "is empty"),
        (
            pb.Namespace(
                name="m",
                layout=pb.Layout(layers=1, kv_heads=1, head_dim=1, dtype="int8", chunk_tokens=1),
                attributes=[pb.Attribute(name="a", value="1"), pb.Attribute(name="a", value="2")],
            ),
            "twice",
        ),
    ],
)
def test_messages_that_are_no_namespace(message: pb.Namespace, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        namespace_of(message)


def test_a_namespace_has_the_same_digest_at_both_ends() -> None:
    message = pb.Namespace(
        name="m",
        layout=pb.Layout(layers=2, kv_heads=3, head_dim=4, dtype="bfloat16", chunk_tokens=5),
        attributes=[pb.Attribute(name="z", value="1"), pb.Attribute(name="a", value="2")],
    )
    namespace = namespace_of(message)
    assert namespace_of(namespace_message(namespace)).digest == namespace.digest


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
    # WrongSize is what a client finds out: no worker raises it.
    assert set(PUBLIC) - {errors.WrongSize} <= set(statuses.STATUSES)


@for_each("kind", list(statuses.STATUSES))
def test_errors_come_back_as_the_same_class_with_the_same_message(kind: type[KVStoreError]) -> None:
    back = round_trip(kind("what was wrong, größer als erlaubt"))
    assert type(back) is kind
    assert str(back) == "what was wrong, größer als erlaubt"


@for_each(
    "kind, code",
    [
        (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.LayoutMismatch, grpc.StatusCode.FAILED_PRECONDITION),
        (errors.RootMismatch, grpc.StatusCode.FAILED_PRECONDITION),
        (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
        (errors.HoldBroken, grpc.StatusCode.ABORTED),
        (errors.Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.SessionLost, grpc.StatusCode.ABORTED),
        (errors.PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
        (statuses.UnknownNamespace, grpc.StatusCode.NOT_FOUND),
    ],
)
def test_each_error_has_its_code_and_needs_no_trailers(kind: type[KVStoreError], code: grpc.StatusCode) -> None:
    assert refusal(kind("x")).code is code
    # From the code alone a client makes an error that a caller treats alike.
    alone = failure(code, "x", (), "here").error
    assert isinstance(alone, (kind, HoldBroken, errors.LayoutMismatch))


def test_a_broken_hold_says_what_is_still_valid() -> None:
    back = round_trip(HoldBroken("a chunk was lost", 512))
    assert isinstance(back, HoldBroken)
    assert back.tokens_valid == 512


def test_a_long_message_is_cut() -> None:
    assert len(refusal(InvalidRequest("x" * 100_000)).message) == statuses.MESSAGE_BYTES_MAX
    assert len(quote(refusal(InvalidRequest("é💥" * 100_000)).message)) <= statuses.MESSAGE_BYTES_MAX


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_descents_arrive_as_they_were_sent(descents: list[bytes]) -> None:
    assert unpack_descents(pack_descents(descents), len(descents)) == (descents if any(descents) else [])


@given(st.binary(max_size=30), st.integers(0, 4))
def test_descents_of_another_count_or_size_are_a_wrong_request(packed: bytes, count: int) -> None:
    try:
        found = unpack_descents(packed, count)
    except InvalidRequest as wrong:
        assert str(count) in str(wrong)
    else:
        assert len(found) in (0, count)
        assert sum(2 + len(each) for each in found) == len(packed)


def test_a_descent_over_the_limit_is_a_wrong_request() -> None:
    size = DESCENT_BYTES_MAX
    assert unpack_descents(pack_descents([bytes(size)]), 1) == [bytes(size)]
    with pytest.raises(InvalidRequest, match="at most 3584"):
        unpack_descents(pack_descents([bytes(size + 1)]), 1)
    with pytest.raises(InvalidRequest, match="over the limit"):
        unpack_descents(bytes(DESCENTS_BYTES_MAX + 1), 1)
