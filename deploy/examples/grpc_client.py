"""A client without kvstore, for HOST:PORT of a worker. Generate kvstore/v1 from proto/ with protoc, beside it."""

import struct
import sys
from hashlib import blake2b

import grpc
import numpy as np
from xxhash import xxh3_64_intdigest as checksum

from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import KVStoreStub

FIXED = struct.Struct("<8sHBBB3xIIIIQ16s16s32s16s8x")  # kvstore/format/FORMAT.md, 4.2
DATA_BYTES, SIZE = 2 << 20, 16
LAYOUT = pb.Layout(layers=2, kv_heads=2, head_dim=8, dtype="float16", chunk_tokens=SIZE)


def image_of(digest, depth, parent, tokens, sections, incarnation=bytes(16)):
    """A chunk's address and image: its header, then its sections."""
    address = blake2b(parent + tokens, digest_size=16, key=digest, person=b"kvstore.chunk.1").digest()
    inner = tokens + bytes(-len(tokens) % 8) + struct.pack(f"<{len(sections)}Q", *map(checksum, sections))
    size = -(-(FIXED.size + len(inner) + 8) // 4096) * 4096
    fields = (1, 1, 1, 0, size, depth, len(tokens), len(sections), len(sections[0]), address, parent, digest)
    header = (FIXED.pack(b"\x93KVCHNK\n", *fields, incarnation) + inner).ljust(size - 8, b"\0")
    return address, header + struct.pack("<Q", checksum(header)) + b"".join(sections)


def put_messages(start, images):
    """The stream of a Put."""
    yield pb.PutRequest(start=start)
    for index, image in enumerate(images):
        for at in range(0, len(image), DATA_BYTES):
            yield pb.PutRequest(index=index, data=image[at : at + DATA_BYTES])


def main(worker):
    """Puts four chunks to a worker and gets them."""
    tokens, kv = np.arange(4 * SIZE, dtype="<u4"), np.random.default_rng(1).random((2, 2, 4 * SIZE, 2, 8)).astype("<f2")
    with grpc.insecure_channel(worker) as channel:
        store, namespace = KVStoreStub(channel), pb.Namespace(name="example", layout=LAYOUT)
        digest = store.OpenNamespace(pb.OpenNamespaceRequest(namespace=namespace), timeout=10).digest
        prompt, images, parents = {"namespace": digest, "tokens": tokens.tobytes()}, [], [bytes(16)]
        parts = [(at, tokens[SIZE * at :][:SIZE].tobytes(), kv[:, :, SIZE * at :][:, :, :SIZE]) for at in range(4)]
        for at, ids, part in parts:
            address, image = image_of(digest, at, parents[-1], ids, [each.tobytes() for each in part.reshape(4, -1)])
            parents, images = [*parents, address], [*images, image]
        store.Put(put_messages(pb.PutStart(**prompt), images), timeout=10)
        found = [b""] * store.Match(pb.MatchRequest(**prompt), timeout=10).chunks
        for message in store.Get(pb.GetRequest(**prompt), timeout=10):
            found[message.index] += message.data
    for (at, ids, part), image in zip(parts, found, strict=True):
        sections = [each.tobytes() for each in np.frombuffer(image[-part.nbytes :], "<f2").reshape(4, -1)]
        # Verify by making the image again (4.3). Only its incarnation is the worker's.
        assert image == image_of(digest, at, parents[at], ids, sections, image[104:120])[1]
        assert b"".join(sections) == part.tobytes()


if __name__ == "__main__":
    main(sys.argv[1])
