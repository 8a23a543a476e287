"""The wire: hand-made messages against the generated classes, parts and checksums, errors as statuses and back."""

from __future__ import annotations

from urllib.parse import quote

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from kvstore import errors
from kvstore.errors import HoldBroken, InvalidRequest, KVStoreError
from kvstore.format.descent import DESCENT_BYTES_MAX
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import statuses
from kvstore.wire.frames import Incoming, decode_frame, encode_frame, encode_parts
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
from tests.kit.workers import sums_of

WITH_START: list[type[Message]] = [pb.PutRequest, pb.GetResponse, pb.PutBlocksRequest]
small_bytes = st.binary(max_size=300)


@for_each("kind", [*WITH_START, pb.GetBlocksResponse])
def test_the_fields_of_data_messages_agree(kind: type[Message]) -> None:
    fields = {field.number: field.name for field in kind.DESCRIPTOR.fields}
    assert fields == {1: "hits" if kind is pb.GetBlocksResponse else "start", 2: "checksums", 3: "data"}


@given(small_bytes, small_bytes, st.lists(small_bytes, max_size=3))
def test_frames_are_what_the_generated_classes_read_and_write(hits: bytes, sums: bytes, data: list[bytes]) -> None:
    made = encode_frame([memoryview(piece) for piece in data], sums, hits)
    message = pb.GetBlocksResponse.FromString(made)
    assert (message.hits, message.checksums, message.data) == (hits, sums, b"".join(data))
    frame = decode_frame(message.SerializeToString())
    assert (frame.start or b"", bytes(frame.checksums), bytes(frame.data)) == (hits, sums, b"".join(data))


def test_a_start_is_the_generated_message() -> None:
    start = pb.PutStart(namespace=bytes(32), tokens=bytes(70_000), first=3)
    made = encode_frame(start=start.SerializeToString(), data=[memoryview(b"abc")], checksums=b"12345678")
    found = pb.PutRequest.FromString(made)
    found.DiscardUnknownFields()  # the seal
    assert found == pb.PutRequest(start=start, checksums=b"12345678", data=b"abc")


def test_unknown_fields_are_passed_over() -> None:
    newer = b"\x20\x96\x01" + b"\x29" + bytes(8) + b"\x35" + bytes(4) + b"\xa2\x06\x03xyz"  # fields 4, 5, 6 and 100
    frame = decode_frame(newer + encode_frame([memoryview(b"data")]) + newer)
    assert (frame.start, bytes(frame.data)) == (None, b"data")


@for_each("missing", range(1, 5))
def test_a_message_that_was_cut_is_a_wrong_request(missing: int) -> None:
    with pytest.raises(InvalidRequest, match="longer than the message"):
        decode_frame(encode_frame([memoryview(b"data")])[:-missing])


@given(st.binary(max_size=64))
def test_what_is_no_message_is_a_wrong_request(garbage: bytes) -> None:
    try:
        decode_frame(garbage)
    except InvalidRequest as error:
        assert "not protobuf" in str(error)


@for_each("garbage", [b"\x1a\x05abc", b"\x1a", b"\x80" * 11, b"\x1b", b"\x29123"])
def test_garbage_says_so(garbage: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not protobuf"):
        decode_frame(garbage)


def test_a_message_over_the_limit() -> None:
    with pytest.raises(InvalidRequest, match="over the limit of 4194304"):
        decode_frame(encode_frame([memoryview(bytes(MESSAGE_BYTES_MAX + 1))]))


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=20), st.integers(9, 200), st.booleans())
def test_parts_arrive_as_they_were_sent(parts: list[bytes], frame_bytes: int, into_memory: bool) -> None:
    memories = [bytearray(len(part)) for part in parts]
    incoming = Incoming(
        [len(part) for part in parts], (lambda index: memoryview(memories[index])) if into_memory else None
    )
    messages = list(encode_parts(map(memoryview, parts), b"start", frame_bytes + 5))
    found = [bytes(part) for message in messages for part in incoming.feed(decode_frame(message))]
    assert found == parts
    assert incoming.is_done
    assert decode_frame(messages[0]).start == b"start"
    assert all(decode_frame(message).start is None for message in messages[1:])
    if into_memory:
        assert [bytes(memory) for memory in memories] == parts


def test_messages_of_tiny_parts_stay_under_the_limit() -> None:
    parts = [memoryview(b"x")] * 600_000
    messages = list(encode_parts(parts, bytes(100)))
    assert len(messages) > 1
    assert max(map(len, messages)) <= MESSAGE_BYTES_MAX
    assert sum(len(decode_frame(message).data) for message in messages) == len(parts)


@given(
    st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=8),
    st.integers(9, 100),
    st.integers(0),
    st.booleans(),
)
def test_a_flipped_bit_is_never_taken(parts: list[bytes], frame_bytes: int, where: int, into_memory: bool) -> None:
    messages = [bytearray(message) for message in encode_parts(map(memoryview, parts), None, frame_bytes)]
    frames = [decode_frame(bytes(message)) for message in messages]
    total = sum(len(frame.data) for frame in frames)
    where %= total
    seen = 0
    memories = [bytearray(len(part)) for part in parts]
    incoming = Incoming([len(part) for part in parts], (lambda at: memoryview(memories[at])) if into_memory else None)
    got: list[bytes] = []
    with pytest.raises(BrokenTransfer, match="does not match its checksum"):
        for frame in frames:
            data = bytearray(frame.data)
            if seen <= where < seen + len(data):
                data[where - seen] ^= 1
            seen += len(data)
            flipped = type(frame)(None, frame.checksums, memoryview(bytes(data)))
            got.extend(bytes(part) for part in incoming.feed(flipped))
    assert got == parts[: len(got)]


def test_bytes_behind_the_last_part() -> None:
    incoming = Incoming([3])
    with pytest.raises(InvalidRequest, match="2 bytes more than its 1 parts"):
        list(incoming.feed(decode_frame(encode_frame([memoryview(b"abcde")], sums_of([b"abc"])))))


@for_each("sums, says", [(0, "no checksum for part 0"), (2, "16 bytes of checksums: expected 8")])
def test_another_number_of_checksums(sums: int, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        list(Incoming([3, 9]).feed(decode_frame(encode_frame([memoryview(b"abcd")], sums * sums_of([b"abc"])))))


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
