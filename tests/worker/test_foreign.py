"""A client with nothing but the .proto: the generated stub and its comments."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.client.store import Store
from kvstore.core.namespace import Namespace
from kvstore.format.keyset import BlockKeys
from kvstore.format.places import Name
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import KVStoreStub
from tests.kit.faulty_root import FaultyRoot, Lost, Rule
from tests.kit.stores import SMALL, kv_of, same
from tests.kit.wire import chain_of, got, images_of, opened, packed, put_messages, raw_stub, sections_of
from tests.kit.workers import WAIT_S, Served, connected, eventually, serving

SIZE = SMALL.chunk_tokens
TOKENS = np.arange(6 * SIZE)
KV = kv_of(SMALL, TOKENS)
SECTIONS = sections_of(KV, SMALL)
CHUNKS = [b"".join(SECTIONS[at : at + SMALL.section_count]) for at in range(0, len(SECTIONS), SMALL.section_count)]
IMAGES = images_of(chain_of(SMALL, TOKENS), SECTIONS)


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
    """Puts the whole prompt, its images cut every ``cut`` bytes wherever that is."""
    start = pb.PutStart(namespace=digest, tokens=packed(TOKENS), first=first)
    answer: pb.PutResponse = stub.Put(iter(put_messages(start, IMAGES[first:], first, cut)), timeout=WAIT_S)
    return answer


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


@pytest.mark.parametrize("cut", [101, 4096, SMALL.section_bytes + 1, 1 << 20])
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
    found = got(stub.Get(pb.GetRequest(namespace=digest, tokens=longer), timeout=WAIT_S))
    assert found == (6, dict(enumerate(CHUNKS)))
    rest = pb.GetRequest(namespace=digest, tokens=longer, first=4, chunks_max=5)
    assert got(stub.Get(rest, timeout=WAIT_S)) == (5, {4: CHUNKS[4]})


def test_a_miss_is_an_answer(stub: KVStoreStub, digest: bytes) -> None:
    assert stub.Match(pb.MatchRequest(namespace=digest, tokens=packed(TOKENS)), timeout=WAIT_S).chunks == 0
    assert got(stub.Get(pb.GetRequest(namespace=digest, tokens=packed(TOKENS)), timeout=WAIT_S)) == (0, {})
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
    count, found = got(stub.Get(pb.GetRequest(namespace=digest, tokens=packed(TOKENS)), timeout=WAIT_S))
    assert count == 6
    assert len(found) < 6
    assert found == dict(enumerate(CHUNKS[: len(found)]))


def test_blocks(stub: KVStoreStub, digest: bytes) -> None:
    blocks = [b"first block", bytes(9_000_000), b"third"]
    names = [bytes([number]) * 32 for number in range(3)]
    images = images_of(BlockKeys.of(Namespace.of("m", SMALL), names, [len(block) for block in blocks]), blocks)
    keys = b"".join(b"\x20" + name for name in names)
    start = pb.PutStart(namespace=digest, keys=keys, sizes=packed([len(block) for block in blocks]))
    assert stub.Put(iter(put_messages(start, images)), timeout=WAIT_S).stored == b"\1\1\1"
    assert stub.MatchBlocks(pb.MatchBlocksRequest(namespace=digest, keys=keys), timeout=WAIT_S).blocks == 3
    asked = keys[:33] + b"\x10" + bytes(16) + keys[66:]
    request = pb.GetRequest(namespace=digest, keys=asked, sizes=packed([11, 3, 5]))
    assert got(stub.Get(request, timeout=WAIT_S)) == (3, {0: b"first block", 2: b"third"})


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
