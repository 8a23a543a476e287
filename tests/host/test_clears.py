"""Clears of a host: the memory of all processes drops what an order names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.census.selection import Selection
from kvstore.core.buffers import Planes
from kvstore.core.clock import SystemClock
from kvstore.core.executor import Deadline
from kvstore.errors import Unavailable
from kvstore.format.keyset import ChunkKeys
from kvstore.host import tables
from kvstore.host.eviction import Eviction
from tests.kit.host_parts import CHUNKS, SPACE
from tests.kit.host_process import LAYOUT, TOKENS_COUNT, kv, tokens
from tests.kit.patience import NEVER_S, eventually
from tests.kit.stores import member_of

OTHER = """
import sys, kvstore
from tests.kit.host_parts import SPACE
from tests.kit.host_process import LAYOUT, kv, tokens
with kvstore.open(sys.argv[1], memory=16 << 20) as store:
    cache = store.namespace("model", LAYOUT)
    print(cache.get(tokens(1))[0], cache.get(tokens(2))[0], flush=True)
    for line in sys.stdin:
        print(cache.get(tokens(1))[0], cache.get(tokens(2))[0], flush=True)
"""


@pytest.mark.parametrize("pinned", [False, True])
def test_a_clear_drops_memory_of_other_processes(tmp_path: Path, pinned: bool) -> None:
    root = tmp_path / "root"
    with kvstore.open(root, memory=16 << 20, write="through") as store:
        cache = store.namespace("model", LAYOUT)
        for prompt in (1, 2):
            cache.put(tokens(prompt), kv(prompt))
        cache.pin(tokens(2), ttl=600)
        command = [sys.executable, "-c", OTHER, str(root)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdin is not None and other.stdout is not None
            assert other.stdout.readline().split() == [str(TOKENS_COUNT)] * 2
            operation = store.clear(Selection(namespace=SPACE.digest), pinned=pinned)
            assert operation.wait()
            other.stdin.write("\n")
            other.stdin.flush()
            kept = 0 if pinned else TOKENS_COUNT
            assert other.stdout.readline().split() == ["0", str(kept)]
            assert operation.counts["chunks"] == (8 if pinned else 4)
            other.stdin.close()
        assert cache.match(tokens(1)) == 0 and cache.match(tokens(2)) == kept
        if kept:
            assert (np.asarray(cache.get(tokens(2))[1]) == 2).all()


def test_a_disk_that_was_away_serves_nothing_of_what_was_cleared(tmp_path: Path) -> None:
    root, disk = tmp_path / "root", (str(tmp_path / "disk"), 64 << 20)
    with kvstore.open(root, memory=16 << 20, disk=disk, write="through") as store:
        cache = store.namespace("model", LAYOUT)
        cache.put(tokens(1), kv(1))
        eventually(lambda: not store.stats()["disk_refilling"])
        assert cache.prefetch(tokens(1), tier="disk").wait() and store.stats()["disk_entries"] == 4
    with kvstore.open(root) as store:
        store.namespace("model", LAYOUT).clear()
    with kvstore.open(root, memory=16 << 20, disk=disk) as store:
        eventually(lambda: not store.stats()["disk_refilling"])
        cache = store.namespace("model", LAYOUT)
        assert cache.match(tokens(1)) == cache.get(tokens(1))[0] == store.stats()["disk_entries"] == 0


def test_a_lock_that_stays_taken_is_named(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with kvstore.open(tmp_path), tables.evicting_lock(folder), pytest.raises(Unavailable, match=r"evicting\.lock"):
        with tables.evicting_lock(folder, waits=False):
            pass


def test_a_put_that_ends_after_the_listing_of_a_clear_loses_no_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, soon = ChunkKeys.of(SPACE, np.array(tokens(1), np.uint32)), Deadline(SystemClock(), NEVER_S)
    with kvstore.open(tmp_path / "root", max_bytes=None) as store:
        cache, write = store.namespace("model", LAYOUT), member_of(store).node.writer.begin(chain, 0, soon)
        source, evict, calls = Planes(kv(1).view(np.uint8), LAYOUT.section_bytes), Eviction.evict, list[int]()
        write.add(source, 0, CHUNKS - 1, soon)
        eventually(lambda: cache.match(tokens(1)) == TOKENS_COUNT - LAYOUT.chunk_tokens)

        def after_the_put(*arguments: Any, **named: Any) -> Any:
            if not calls:
                write.add(source, CHUNKS - 1, 1, soon)
                write.commit(soon)
            done = evict(*arguments, **named)
            calls.append(cache.match(tokens(1)))
            return done

        monkeypatch.setattr(Eviction, "evict", after_the_put)
        assert store.clear(Selection(namespace=SPACE.digest)).wait()
        assert calls == [TOKENS_COUNT, 0], "the first listing lacked the last chunk"
