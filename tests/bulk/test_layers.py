"""Layers through a worker are slices of what it lends or sends: right or an error, whatever fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.client.cache import Cache
from kvstore.errors import HoldBroken
from kvstore.format import places
from kvstore.format.keyset import ChunkKeys
from tests.kit.arenas import all_let_go, filled, leases_end, lose, serving_memory
from tests.kit.cases import for_each
from tests.kit.transports import MEDIUM, WAYS, bulk_files_of, same, tokens_and_kv
from tests.kit.workers import Served, connected, eventually, serving

COUNT = 70
TOKENS, KV = tokens_and_kv(COUNT)
SIZE = MEDIUM.chunk_tokens


@pytest.fixture(params=["memory", "files", "both"])
def served(request: pytest.FixtureRequest, tmp_root: Path) -> Iterator[Served]:
    """A worker that has the prompt in memory, in files alone, or a part of it in memory."""
    if request.param == "files":
        with serving(tmp_root) as found, connected(found) as store:
            store.namespace("m", MEDIUM).put(TOKENS, KV)
            yield found
        return
    with serving_memory(tmp_root) as found:
        chain = filled(found, TOKENS, KV, MEDIUM)
        if request.param == "both":
            lose(found, chain, 20, 40)
        yield found
        all_let_go(found)


def read(cache: Cache, out: list[npt.NDArray[Any]] | None = None) -> int:
    """Reads all layers and compares them; returns how many came."""
    seen = 0
    with cache.hold(TOKENS) as hold:
        for layer, k, v in hold.layers(out):
            assert layer == seen
            assert same(k, KV[layer, 0]) and same(v, KV[layer, 1])
            seen += 1
    return seen


def test_layers_by_any_way_are_right_and_in_order(served: Served) -> None:
    for way in WAYS:
        with connected(served, bulk=way) as store:
            cache = store.namespace("m", MEDIUM)
            assert read(cache) == MEDIUM.layers
            assert read(cache, [np.empty_like(KV[0]) for _ in range(3)]) == MEDIUM.layers
            stats = store.stats()
            assert stats[f"client_gets_{way}"] == 2
            assert stats["client_bulk_broken"] == stats["client_bulk_damaged"] == 0


def test_layers_left_in_the_middle_keep_nothing(served: Served) -> None:
    with connected(served, bulk="shared") as store:
        cache = store.namespace("m", MEDIUM)
        with cache.hold(TOKENS) as hold:
            layers: Any = hold.layers()
            next(layers)
            assert same(cache.get(TOKENS)[1], KV), "the connection is free between two layers"
            layers.close()
            del layers
        if served.member.node.memory is not None:
            leases_end(served)
        eventually(lambda: not [name for name in bulk_files_of(os.getpid()) if "/chunks/" in name], "no chunk is open")


@for_each("way", ["shared", "tcp", "grpc"])
def test_i1_damaged_chunk_ends_the_layers_before_it(tmp_root: Path, way: str) -> None:
    with serving(tmp_root) as served, connected(served, bulk=way) as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV)
        address = ChunkKeys.of(cache.namespace, TOKENS.astype(np.uint32)).addresses[3]
        file = tmp_root / places.chunk(address, cache.namespace.id, served.member.node.identity.shard_bits)
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        with pytest.raises(HoldBroken) as broken:
            read(cache)
        assert broken.value.tokens_valid == 3 * SIZE
        assert not file.exists()
        assert cache.match(TOKENS) == 3 * SIZE


def test_hold_that_ends_at_the_worker_gives_no_layers(served: Served) -> None:
    with connected(served, bulk="shared") as store, store.namespace("m", MEDIUM).hold(TOKENS) as hold:
        lease = hold._held._lease  # type: ignore[attr-defined]
        served.worker.service.holds.release(lease.id)
        with pytest.raises(HoldBroken):
            list(hold.layers())


def test_hold_released_in_the_middle_gives_no_more_layers(served: Served) -> None:
    with connected(served, bulk="shared") as store, store.namespace("m", MEDIUM).hold(TOKENS) as hold:
        layers = hold.layers()
        next(layers)
        hold.release()
        with pytest.raises(HoldBroken, match="released"):
            list(layers)
