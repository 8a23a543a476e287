"""Clients of a worker in another language: the generated stub, and messages worked out the slow way."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from kvstore import Layout
from kvstore.core.namespace import Namespace
from kvstore.format.header import checksum, decode
from kvstore.format.keyset import ChunkKeys, KeySet
from kvstore.transport.status import ERROR_KEY
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import KVStoreStub
from tests.kit.images import encoded
from tests.kit.stores import SMALL, kv_of
from tests.kit.workers import WAIT_S, Served


@contextmanager
def raw_channel(served: Served) -> Iterator[grpc.Channel]:
    """A plain channel with the defaults of gRPC."""
    with grpc.insecure_channel(served.address) as channel:
        yield channel


@contextmanager
def raw_stub(served: Served) -> Iterator[KVStoreStub]:
    """The generated stub, all that a client in another language has."""
    with raw_channel(served) as channel:
        yield KVStoreStub(channel)


def packed(tokens: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Token ids as a foreign client packs them."""
    return struct.pack(f"<{len(tokens)}I", *map(int, tokens))


def opened(stub: KVStoreStub, layout: Layout, name: str = "m") -> bytes:
    """The digest of a namespace, opened by a foreign client."""
    message = pb.Namespace(name=name, layout=pb.Layout(**layout.to_dict()))
    digest: bytes = stub.OpenNamespace(pb.OpenNamespaceRequest(namespace=message), timeout=WAIT_S).digest
    return digest


def sections_of(kv: npt.NDArray[Any], layout: Layout) -> list[bytes]:
    """The sections of all chunks of an array, in the order of the wire, worked out the slow way."""
    found = []
    for start in range(0, kv.shape[2] - layout.chunk_tokens + 1, layout.chunk_tokens):
        for layer in kv:
            found += [plane[start : start + layout.chunk_tokens].tobytes() for plane in layer]
    return found


def images_of(wanted: KeySet, sections: Sequence[bytes]) -> list[bytes]:
    """The images of all chunks or blocks, in order, that have these sections."""
    found = []
    for index in range(len(wanted)):
        expected = wanted.expected(index)
        own = sections[index * expected.section_count :][: expected.section_count]
        found.append(encoded(expected, b"".join(own)))
    return found


def chain_of(layout: Layout, tokens: Sequence[int] | npt.NDArray[Any], name: str = "m") -> ChunkKeys:
    """The chunks of a prompt in the namespace that ``opened`` opens."""
    return ChunkKeys.of(Namespace.of(name, layout), np.asarray(tokens, np.uint32))


def put_messages(
    start: pb.PutStart, images: Sequence[bytes], first: int = 0, cut: int = 2 << 20
) -> list[pb.PutRequest]:
    """The stream of a Put of images from index ``first`` on, with ``cut`` bytes in each message."""
    return [pb.PutRequest(start=start)] + [
        pb.PutRequest(index=first + number, data=image[at : at + cut])
        for number, image in enumerate(images)
        for at in range(0, len(image), cut)
    ]


def got(messages: Iterable[pb.GetResponse]) -> tuple[int, dict[int, bytes]]:
    """The answer to a Get: the chunks found, and the sections of each image by its index, verified."""
    first, *rest = messages
    assert first.HasField("start") and not any(message.HasField("start") for message in rest)
    assert all(len(message.SerializeToString()) <= 4 << 20 for message in [first, *rest])
    images: dict[int, bytes] = {}
    for message in rest:
        images[message.index] = images.get(message.index, b"") + message.data
    found = {}
    for index, image in images.items():
        header = decode(image)
        assert len(image) == header.file_bytes
        sections = image[header.header_bytes :]
        size = header.section_bytes
        parts = [sections[at : at + size] for at in range(0, len(sections), size)]
        assert tuple(map(checksum, parts)) == header.checksums
        found[index] = sections
    return first.start.chunks, found


def refused(call: Callable[[], object]) -> tuple[grpc.StatusCode, str, str]:
    """Status code, message and error class of a call that must fail."""
    try:
        call()
    except grpc.RpcError as error:
        trailers: Any = error.trailing_metadata() or ()
        return error.code(), error.details() or "", str(dict(trailers).get(ERROR_KEY, ""))
    raise AssertionError("the call was answered")


TOKENS = np.arange(4 * SMALL.chunk_tokens)
"""A prompt of four chunks."""
KV = kv_of(SMALL, TOKENS)
SECTIONS = sections_of(KV, SMALL)
IMAGES = images_of(chain_of(SMALL, TOKENS), SECTIONS)
