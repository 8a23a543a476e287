"""A client with nothing but the .proto: the generated stub and its comments."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from kvstore.client.store import Store
from kvstore.format.places import Name
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import KVStoreStub
from tests.kit.faulty_root import FaultyRoot, Lost, Rule
from tests.kit.stores import SMALL, kv_of, same
from tests.kit.workers import (
    WAIT_S,
    Served,
    connected,
    eventually,
    opened,
    packed,
    raw_stub,
    refused,
    sections_of,
    serving,
    sums_of,
)

SIZE = SMALL.chunk_tokens
TOKENS = np.arange(6 * SIZE)
KV = kv_of(SMALL, TOKENS)
SECTIONS = sections_of(KV, SMALL)
PER_CHUNK = SMALL.section_count


@pytest.fixture
def root() -> FaultyRoot:
    return FaultyRoot(MemoryRoot(MemoryFiles()))


@pytest.fixture
def served(root: FaultyRoot) -> Iterator[Served]:
    with serving(root) as running:
        yield running


@pytest.fixture
def stub(served: Served) -> Iterator[KVStoreStub]:
    with raw_stub(served) as made:
        yield made


@pytest.fixture
def store(served: Served) -> Iterator[Store]:
    with connected(served) as made:
        yield made


@pytest.fixture
def digest(stub: KVStoreStub) -> bytes:
    return opened(stub, SMALL)


def put(stub: KVStoreStub, digest: bytes, cut: int = 1 << 20, first: int = 0) -> pb.PutResponse:
    """Puts the whole prompt, its bytes cut every ``cut`` bytes wherever that is."""

    def messages() -> Iterator[pb.PutRequest]:
        yield pb.PutRequest(start=pb.PutStart(namespace=digest, tokens=packed(TOKENS), first=first))
        sections = SECTIONS[first * PER_CHUNK :]
        data = b"".join(sections)
        for at in range(0, len(data), cut):
            piece = data[at : at + cut]
            size = SMALL.section_bytes
            ending = sections[at // size : (at + len(piece)) // size]
            yield pb.PutRequest(checksums=sums_of(ending), data=piece)

    answer: pb.PutResponse = stub.Put(messages(), timeout=WAIT_S)
    return answer


def joined(messages: Iterator[pb.GetResponse]) -> tuple[int, bytes, bytes]:
    """Joins the answer to a Get: chunks found, data, checksums."""
    first = next(messages)
    assert first.HasField("start")
    rest = [first, *messages]
    assert not any(message.HasField("start") for message in rest[1:])
    assert all(len(message.SerializeToString()) <= 4 << 20 for message in rest)
    return first.start.chunks, b"".join(each.data for each in rest), b"".join(each.checksums for each in rest)


def test_open_namespace_says_the_geometry(stub: KVStoreStub) -> None:
    layout = pb.Layout(**SMALL.to_dict())
    answer = stub.OpenNamespace(
        pb.OpenNamespaceRequest(namespace=pb.Namespace(name="m", layout=layout)), timeout=WAIT_S
    )
    assert len(answer.digest) == 32
    assert answer.section_bytes == SMALL.section_bytes
    assert (answer.section_count, answer.chunk_bytes) == (SMALL.section_count, SMALL.chunk_bytes)
    (listed,) = stub.ListNamespaces(pb.ListNamespacesRequest(), timeout=WAIT_S)
    assert (listed.digest, listed.namespace.name, listed.namespace.layout) == (answer.digest, "m", layout)


@pytest.mark.parametrize("cut", [1, 7, SMALL.section_bytes, SMALL.section_bytes + 1, SMALL.chunk_bytes, 1 << 20])
def test_put_cut_anywhere_is_read_by_our_client(stub: KVStoreStub, store: Store, digest: bytes, cut: int) -> None:
    answer = put(stub, digest, cut)
    assert (answer.tokens_present, answer.chunks_written, answer.chunks_found) == (len(TOKENS), 6, 0)
    assert answer.bytes_written == 6 * SMALL.chunk_bytes
    assert same(store.namespace("m", SMALL).get(TOKENS)[1], KV)


def test_match_and_get_what_our_client_put(stub: KVStoreStub, store: Store, digest: bytes) -> None:
    store.namespace("m", SMALL).put(TOKENS, KV)
    longer = packed([*TOKENS, *range(50)])
    answer = stub.Match(pb.MatchRequest(namespace=digest, tokens=longer), timeout=WAIT_S)
    assert (answer.chunks, answer.tokens) == (6, 6 * SIZE)
    chunks, data, sums = joined(stub.Get(pb.GetRequest(namespace=digest, tokens=longer), timeout=WAIT_S))
    assert (chunks, data, sums) == (6, b"".join(SECTIONS), sums_of(SECTIONS))


def test_a_miss_is_an_answer(stub: KVStoreStub, digest: bytes) -> None:
    assert stub.Match(pb.MatchRequest(namespace=digest, tokens=packed(TOKENS)), timeout=WAIT_S).chunks == 0
    request = pb.GetRequest(namespace=digest, tokens=packed(TOKENS))
    assert joined(stub.Get(request, timeout=WAIT_S)) == (0, b"", b"")
    held = stub.Hold(pb.HoldRequest(namespace=digest, tokens=packed(TOKENS)), timeout=WAIT_S)
    assert (held.hold, held.chunks) == (b"", 0)
    pinned = stub.Pin(pb.PinRequest(namespace=digest, tokens=packed(TOKENS), ttl_s=60), timeout=WAIT_S).pin
    assert (pinned.id, pinned.tokens) == ("", 0)


def test_a_chunk_that_vanishes_ends_the_stream_between_two_chunks(
    stub: KVStoreStub, digest: bytes, root: FaultyRoot
) -> None:
    put(stub, digest)
    folders = [Name(f"chunks/{folder.name}") for folder in root.list(Name("chunks"))]
    fourth = sorted(f"{folder}/{entry.name}" for folder in folders for entry in root.list(folder))[3]
    root.set_rules([Rule("open", Lost(), lambda name: name == fourth)])
    chunks, data, _ = joined(stub.Get(pb.GetRequest(namespace=digest, tokens=packed(TOKENS)), timeout=WAIT_S))
    assert chunks == 6
    assert len(data) < 6 * SMALL.chunk_bytes
    assert len(data) % SMALL.chunk_bytes == 0
    assert data == b"".join(SECTIONS)[: len(data)]


def test_hold_read_and_release(stub: KVStoreStub, digest: bytes) -> None:
    put(stub, digest)
    held = stub.Hold(pb.HoldRequest(namespace=digest, tokens=packed(TOKENS), ttl_s=30), timeout=WAIT_S)
    assert (len(held.hold), held.chunks, held.tokens) == (16, 6, 6 * SIZE)
    request = pb.GetRequest(hold=held.hold)
    assert joined(stub.Get(request, timeout=WAIT_S))[1] == b"".join(SECTIONS)
    assert stub.Release(pb.ReleaseRequest(hold=held.hold), timeout=WAIT_S).released
    assert not stub.Release(pb.ReleaseRequest(hold=held.hold), timeout=WAIT_S).released
    code, message, kind = refused(lambda: list(stub.Get(request, timeout=WAIT_S)))
    assert (code, kind) == (grpc.StatusCode.ABORTED, "HoldBroken")
    assert "match again" in message


def test_pin_count_list_and_unpin(stub: KVStoreStub, digest: bytes) -> None:
    put(stub, digest)
    request = pb.PinRequest(namespace=digest, tokens=packed(TOKENS), ttl_s=60, owner="elsewhere")
    pin = stub.Pin(request, timeout=WAIT_S).pin
    assert (pin.owner, pin.namespace, pin.tokens) == ("elsewhere", "m", 6 * SIZE)
    (listed,) = (each.pin for each in stub.ListPins(pb.ListPinsRequest(), timeout=WAIT_S))
    assert (listed.id, listed.owner, listed.namespace, listed.tokens) == (pin.id, "elsewhere", "m", 6 * SIZE)
    assert abs(listed.expires_s - pin.expires_s) < 1
    counting = pb.CountRefsRequest(namespace=digest, tokens=packed(TOKENS))
    assert stub.CountRefs(counting, timeout=WAIT_S).refs == 1
    assert stub.Unpin(pb.UnpinRequest(id=pin.id), timeout=WAIT_S).found
    assert not stub.Unpin(pb.UnpinRequest(id=pin.id), timeout=WAIT_S).found
    assert stub.CountRefs(counting, timeout=WAIT_S).refs == 0


def test_put_skips_what_is_there_and_says_where_it_is_not(stub: KVStoreStub, digest: bytes) -> None:
    assert put(stub, digest, first=3).tokens_present == 0
    head = pb.PutStart(namespace=digest, tokens=packed(TOKENS[: 3 * SIZE]))
    first = SECTIONS[: 3 * PER_CHUNK]
    stub.Put(iter([pb.PutRequest(start=head, checksums=sums_of(first), data=b"".join(first))]), timeout=WAIT_S)
    assert put(stub, digest, first=5).tokens_present == 3 * SIZE
    answer = put(stub, digest, first=3)
    assert (answer.tokens_present, answer.chunks_written) == (6 * SIZE, 3)


def test_blocks(stub: KVStoreStub, digest: bytes) -> None:
    blocks = [b"first block", bytes(9_000_000), b"third"]
    keys = b"".join(b"\x20" + bytes([number]) * 32 for number in range(3))
    sizes = packed([len(block) for block in blocks])
    data = b"".join(blocks)

    def messages() -> Iterator[pb.PutBlocksRequest]:
        yield pb.PutBlocksRequest(start=pb.PutBlocksStart(namespace=digest, keys=keys, sizes=sizes))
        yield pb.PutBlocksRequest(checksums=sums_of(blocks[:1]), data=data[:4_000_000])
        yield pb.PutBlocksRequest(data=data[4_000_000:8_000_000])
        yield pb.PutBlocksRequest(checksums=sums_of(blocks[1:]), data=data[8_000_000:])

    assert stub.PutBlocks(messages(), timeout=WAIT_S).stored == b"\1\1\1"
    assert stub.MatchBlocks(pb.MatchBlocksRequest(namespace=digest, keys=keys), timeout=WAIT_S).blocks == 3
    asked = keys[:33] + b"\x10" + bytes(16) + keys[66:]
    request = pb.GetBlocksRequest(namespace=digest, keys=asked, sizes=packed([11, 3, 5]))
    answer = list(stub.GetBlocks(request, timeout=WAIT_S))
    assert b"".join(each.hits for each in answer) == b"\1\0\1"
    assert b"".join(each.data for each in answer) == b"first blockthird"
    assert b"".join(each.checksums for each in answer) == sums_of([b"first block", b"third"])


def test_clear_and_stats(stub: KVStoreStub, digest: bytes) -> None:
    put(stub, digest)
    cleared = stub.Clear(pb.ClearRequest(namespace=digest), timeout=WAIT_S)
    assert cleared.chunks == 6
    assert cleared.bytes >= 6 * SMALL.chunk_bytes
    request = pb.StatsRequest()
    eventually(lambda: stub.Stats(request, timeout=WAIT_S).gauges["bytes_in_flight"] == 0, "all memory is given back")
    stats = stub.Stats(request, timeout=WAIT_S)
    assert stats.counters["chunks_written"] == 6
    assert stats.counters["wire_bytes_in"] == 6 * SMALL.chunk_bytes
    assert stats.gauges["root_hangs"] == 0
