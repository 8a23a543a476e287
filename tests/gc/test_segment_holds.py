"""Holds of segments: a sweep spares all that was found (rule A2)."""

from __future__ import annotations

import numpy as np

from kvstore.client.local import LocalPort
from kvstore.client.store import Store
from kvstore.format import places
from kvstore.keyset import ChunkKeys
from kvstore.layout import Layout
from kvstore.segments import Match, Rope
from kvstore_gc.deletion import SweepPlan, Victim
from tests.kit.clusters import cluster, eventually

SIZE = 8
LAYOUT = Layout(layers=1, kv_heads=1, head_dim=4, dtype="float32", chunk_tokens=SIZE)
ROPE = Rope(10_000.0, 4)


def test_held_segments_outlive_a_sweep_that_takes_the_others() -> None:
    documents = [np.arange(first, first + 3 * SIZE, dtype=np.uint32) for first in (100, 200, 300)]
    with cluster(shard_bits=0) as c:
        segments = (
            Store(LocalPort(c.node())).namespace("segmented", LAYOUT, "weights").segments(ROPE, chunk_tokens=SIZE)
        )
        for document in documents:
            kv = np.ones(LAYOUT.shape(len(document)), np.float32)
            assert segments.put(document, kv).chunks_written == 3
        space = segments.namespace
        chains = [ChunkKeys.of(space, document) for document in documents]

        def victims(chain: ChunkKeys) -> list[Victim]:
            names = [(places.chunk(address, space.id, 0), address) for address in chain.addresses]
            found = [(name, address, c.root.stat(name)) for name, address in names]
            return [
                Victim(address, space.id, stat.size_bytes, stat.mtime_ns)
                for name, address, stat in found
                if stat is not None
            ]

        elsewhere = segments.find(documents[2], [0])
        matches = segments.find(np.concatenate(documents[:2]), [0, 3 * SIZE])
        with segments.hold(matches):
            plan = SweepPlan(0, tuple(one for chain in chains for one in victims(chain)))
            report = c.collector().sweep([plan])
            assert (report.reaped.count, report.spared["held"]) == (3, 6)
            assert [len(victims(chain)) for chain in chains] == [3, 3, 0]
            eventually(lambda: len(segments.find(np.concatenate(documents[:2]), [0, 24])) == 2, "the sweep is over")
            moved = [Match(24 + one.start, 24 + one.end, one.tokens) for one in matches]
            with segments.hold([*elsewhere, *moved]) as held:
                assert held.matches == moved, "what is gone is not held"
            with segments.hold(elsewhere) as held:
                assert held.matches == []
