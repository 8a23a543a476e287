"""Look-ups through the control service of a real worker: where each chunk of a prompt lies."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.write_mode import WriteMode
from kvstore.v1 import control_pb2 as pb
from tests.kit.administration import KV, SIZE, TOKENS, damage_payload, raw_control
from tests.kit.memory_workers import working
from tests.kit.stores import SMALL, TINY, chunk_files, kv_of
from tests.kit.tiers import faulty, held
from tests.kit.workers import WAIT_S, connected, eventually, packed, serving

pytestmark = pytest.mark.slow


def test_lookup_says_where_each_chunk_lies_and_reads_no_payload(tmp_root: Path) -> None:
    with serving(tmp_root) as served, connected(served) as store:
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, KV, priority=70, ttl=300)
        for path in chunk_files(tmp_root):
            damage_payload(path)
        before, times = served.member.stats(), [path.stat().st_mtime_ns for path in chunk_files(tmp_root)]
        places = store.control.lookup(cache, np.arange(6 * SIZE))
        assert [each.index for each in places] == [0, 1, 2, 3]
        for place in places:
            root = place.root
            assert root is not None
            assert root.size_bytes == chunk_files(tmp_root)[0].stat().st_size
            assert (root.hints.priority, root.hints.ttl_s, root.uses) == (70, 300, 0)
            assert abs(root.last_use_s - time.time()) < 120
            assert (place.memory, place.on_disk, place.peers, place.pins) == (None, False, (), 0)
        after = served.member.stats()
        for name in ("chunks_read", "bytes_read", "requests_match", "miss_absent", "miss_damaged", "refreshed"):
            assert after[name] == before[name], name
        assert [path.stat().st_mtime_ns for path in chunk_files(tmp_root)] == times
        assert len(store.control.lookup(cache, TOKENS, chunks_max=2)) == 2
        assert store.control.lookup(cache, TOKENS + 1) == []


def test_lookup_sees_memory_and_local_disk_and_what_is_dirty(tmp_path: Path) -> None:
    root = faulty()
    with working(root, write=WriteMode.BEHIND, disk=tmp_path / "disk") as (acting, served), connected(served) as store:
        eventually(lambda: not acting.stat("disk_refilling"), "the disk is taken in")
        cache, tokens = store.namespace("m", acting.cache.layout), acting.prompts.tokens(1, 3)
        with held(root):
            acting.put(1, 3)
            for place in store.control.lookup(cache, tokens):
                assert place.root is None and place.memory is not None
                assert place.memory.is_dirty and place.memory.size_bytes == acting.unit_bytes
        acting.drain()
        (first, *_) = places = store.control.lookup(cache, tokens)
        assert len(places) == 3 and first.root is not None and first.memory is not None and not first.memory.is_dirty
        assert cache.prefetch(tokens, "disk").wait(WAIT_S)
        assert all(each.memory is not None and each.on_disk for each in store.control.lookup(cache, tokens))


def test_lookup_counts_the_pins_that_cover_each_chunk() -> None:
    with serving() as served, connected(served) as store:
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, KV)
        cache.pin(TOKENS[: 2 * SIZE])
        cache.pin(TOKENS[: 3 * SIZE])
        assert [each.pins for each in store.control.lookup(cache, TOKENS)] == [2, 2, 1, 0]


def test_a_long_prompt_is_told_in_several_messages_up_to_the_first_chunk_that_is_nowhere() -> None:
    tokens = np.arange(700 * TINY.chunk_tokens)
    with serving() as served, connected(served) as store, raw_control(served) as stub:
        cache = store.namespace("m", TINY)
        cache.put(tokens[: 600 * TINY.chunk_tokens], kv_of(TINY, tokens[: 600 * TINY.chunk_tokens]))
        assert [each.index for each in store.control.lookup(cache, tokens)] == [*range(600)]
        request = pb.LookupRequest(namespace=cache.namespace.digest, tokens=packed(tokens))
        messages = list(stub.Lookup(request, timeout=WAIT_S))
        assert len(messages) > 1 and sum(len(each.chunks) for each in messages) == 600
        assert max(each.ByteSize() for each in messages) < 4 << 20
