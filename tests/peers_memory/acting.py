"""A worker with memory and peers in a separate process, which takes commands line by line.

    python -m tests.peers_memory.acting ROOT ETCD SYNC_INTERVAL_S

prints the address that it serves at; then ``put SEED CHUNKS``, ``match SEED CHUNKS``, ``known SEED CHUNKS`` (what peers
are said to have) and ``get SEED CHUNKS`` each print a number: how many leading chunks, of a get those that are right;
-1 if a byte is wrong. ``stat NAME`` prints a counter or gauge, ``clear`` clears the namespace.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from kvstore import Layout
from kvstore.client.cache import Cache
from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.core.address import TokenArray
from kvstore.core.clock import RandomIds, SystemClock
from kvstore.core.write_mode import WriteMode
from kvstore.engine.open import join
from kvstore.engine.settings import Limits, NodeOptions, TierSettings
from kvstore.format.keyset import ChunkKeys
from kvstore.meta.etcd import EtcdMetadata
from kvstore.meta.workers import Digests
from kvstore.peers.tier import join_peers
from kvstore.root.identity import create_or_open
from kvstore.root.posix import PosixRoot
from kvstore.worker.server import Worker
from tests.kit.stores import kv_of, same

LAYOUT = Layout(layers=2, kv_heads=2, head_dim=64, dtype="float16", chunk_tokens=16)
MEMORY_BYTES = 32 << 20
GET_S = META_S = 60.0
"""On a busy machine everything is done in half of that, unless it waits for a dead peer or etcd for all of it."""


def tokens_of(seed: int, chunks: int) -> TokenArray:
    """A prompt that no other seed has."""
    return np.random.default_rng(seed).integers(0, 1 << 31, chunks * LAYOUT.chunk_tokens).astype("<u4")


def main() -> None:
    """Serves until its input ends."""
    root, etcd, interval_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    opened, clock, ids = PosixRoot(root), SystemClock(), RandomIds()
    settings = TierSettings(MEMORY_BYTES, write=WriteMode.THROUGH, sync_interval_s=interval_s)
    limits = Limits(read_deadline_s=GET_S, meta_deadline_s=META_S)
    member = join(
        opened,
        create_or_open(opened, ids),
        EtcdMetadata(etcd),
        limits=limits,
        clock=clock,
        ids=ids,
        in_cluster=True,
        options=NodeOptions(tiers=settings),
    )
    assert member.node.tiers is not None
    peers = join_peers(member.node.tiers, Digests(member.meta, member.keys), member.presence)
    worker = Worker(member, "127.0.0.1:0")
    worker.start()
    peers.start(worker.advertised)
    cache = Store(LocalTransport(member)).namespace("m", layout=LAYOUT)
    print(worker.advertised, flush=True)
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "stat":
            print(member.stats()[rest[0]], flush=True)
        elif word == "clear":
            cache.clear()
            print(0, flush=True)
        else:
            tokens = tokens_of(int(rest[0]), int(rest[1]))
            if word == "known":
                print(peers.leading(ChunkKeys.of(cache.namespace, tokens), 0), flush=True)
            else:
                print(_done(cache, word, tokens), flush=True)
    peers.close(2.0)
    worker.stop()
    member.close()


def _done(cache: Cache, word: str, tokens: TokenArray) -> int:
    if word == "put":
        return cache.put(tokens, kv_of(LAYOUT, tokens)).tokens_present // LAYOUT.chunk_tokens
    if word == "match":
        return cache.match(tokens) // LAYOUT.chunk_tokens
    count, kv = cache.get(tokens)
    return count // LAYOUT.chunk_tokens if same(kv, kv_of(LAYOUT, tokens[:count])) else -1


if __name__ == "__main__":
    main()
