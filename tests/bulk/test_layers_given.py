"""Layers out of a worker's memory, or its open files: one copy, verified, and the connection is free meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.client import layers_ahead
from kvstore.client.bulk import layers_given
from kvstore.client.cache import BAND_MAX
from kvstore.client.layers_ahead import LayersAhead
from kvstore.client.limits import ClientLimits
from kvstore.client.store import Store
from kvstore.errors import HoldBroken
from kvstore.node.layer_run import LayerRun
from kvstore.root.posix_reader import PosixReader
from tests.kit.arenas import all_let_go, filled, lose, memory_of, serving_memory
from tests.kit.patience import stretched
from tests.kit.stores import chunk_files
from tests.kit.transports import MEDIUM, bulk_files_of, same, tokens_and_kv
from tests.kit.workers import WAIT_S, Served, connected, eventually, serving

COUNT = 150
"""More chunks than are asked for at once."""
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


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The streams that were begun."""
    begun: list[str] = []
    for owner, name in ((layers_ahead, "receive_layers"), (LayersAhead, "_receive_grpc")):
        real = getattr(owner, name)

        def receive(*arguments: Any, name: str = name, real: Any = real) -> Any:
            begun.append(name)
            return real(*arguments)

        monkeypatch.setattr(owner, name, receive)
    return begun


def read(store: Store, out: list[npt.NDArray[Any]] | None = None) -> int:
    """Reads all layers and compares them; returns how many were right."""
    seen = 0
    with store.namespace("m", MEDIUM).hold(TOKENS) as hold:
        for layer, k, v in hold.layers(out):
            assert layer == seen
            assert same(k, KV[layer, 0]) and same(v, KV[layer, 1])
            seen += 1
    return seen


def test_layers_are_taken_where_the_worker_has_them(served: Served, streams: list[str]) -> None:
    def run_case(given: int | None) -> None:
        out = given and [np.empty_like(KV[0]) for _ in range(given)]
        with connected(served, bulk="shared") as store:
            for _ in range(2):
                assert read(store, out or None) == MEDIUM.layers
            assert store.stats()["client_bulk_broken"] == store.stats()["client_bulk_damaged"] == 0
        assert streams == []
        eventually(lambda: not [name for name in bulk_files_of(os.getpid()) if "/chunks/" in name], "no chunk is open")

    for given in (None, 3):
        run_case(given)


def test_the_connection_serves_others_between_two_layers(served: Served, streams: list[str]) -> None:
    with connected(served, bulk="shared", limits=ClientLimits(bulk_links_max=1)) as store:
        cache = store.namespace("m", MEDIUM)
        with cache.hold(TOKENS) as hold:
            for layer, k, _ in hold.layers():
                assert same(k, KV[layer, 0])
                assert same(cache.get(TOKENS[:SIZE])[1], KV[:, :, :SIZE])
        assert store.stats()["client_gets_grpc"] == 0
    assert streams == []


def test_layers_that_are_left_in_the_middle_let_go_of_everything(served: Served) -> None:
    with connected(served, bulk="shared") as store, store.namespace("m", MEDIUM).hold(TOKENS) as hold:
        for taken in (0, 1, 3) * 3:
            layers: Any = hold.layers()
            for _ in range(taken):
                next(layers)
            layers.close()
        eventually(lambda: not [name for name in bulk_files_of(os.getpid()) if "/chunks/" in name], "no chunk is open")


@pytest.mark.parametrize("layer", [0, 2])
def test_i1_a_damaged_image_is_never_a_layer_and_the_root_has_the_chunk(
    tmp_root: Path, streams: list[str], layer: int
) -> None:
    """The worker learns of it, because it is asked for the layers then; those that the caller has stay as they are."""
    with serving_memory(tmp_root) as served:
        chain = filled(served, TOKENS, KV, MEDIUM)
        memory = memory_of(served)
        with memory.refer(chain, 70, 1) as slots:
            entry = slots.entries[0]
            assert entry is not None
            memory.arena.memory[entry.offset + 4096 + 2 * layer * MEDIUM.section_bytes + 5] ^= 1
        with connected(served, bulk="shared") as store:
            assert read(store) == MEDIUM.layers
            assert streams == ["_receive_grpc"]
            assert store.stats()["client_bulk_damaged"] == 1
            assert store.stats()["memory_damaged"] == 1
            assert read(store) == MEDIUM.layers
            assert streams == ["_receive_grpc"]
        all_let_go(served)


@pytest.mark.parametrize("place", [40, 4096 + 5, -1])
def test_a_damaged_file_ends_the_layers_where_it_is_and_is_set_aside(tmp_root: Path, place: int) -> None:
    with serving(tmp_root) as served, connected(served, bulk="shared") as store:
        cache = store.namespace("m", MEDIUM)
        cache.put(TOKENS, KV)
        victim = sorted(chunk_files(tmp_root))[7]
        content = bytearray(victim.read_bytes())
        content[place] ^= 1
        victim.write_bytes(content)
        seen = 0
        with cache.hold(TOKENS) as hold, pytest.raises(HoldBroken):
            for layer, k, v in hold.layers():
                assert same(k, KV[layer, 0]) and same(v, KV[layer, 1])
                seen += 1
        assert seen == (MEDIUM.layers - 1 if place == -1 else 0)
        assert not victim.exists()


def test_files_that_are_in_no_cache_are_read_all_the_same(
    served: Served, streams: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LayerRun.read

    def blocked(run: LayerRun, *arguments: Any) -> Any:
        done, opened, mtimes_ns = real(run, *arguments)
        start, stop = arguments[:2]
        return done & (run.fds[start:stop] < 0), opened, mtimes_ns

    monkeypatch.setattr(LayerRun, "read", blocked)
    with connected(served, bulk="shared") as store:
        assert read(store) == MEDIUM.layers
    assert streams == []


def test_more_files_than_a_process_may_open_come_as_a_stream(
    tmp_root: Path, streams: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers_given, "FILES_MAX", COUNT - 1)
    with serving(tmp_root) as served, connected(served, bulk="shared") as store:
        store.namespace("m", MEDIUM).put(TOKENS, KV)
        assert read(store) == MEDIUM.layers
    assert streams == ["receive_layers"]


def test_more_leases_than_a_client_may_have_make_a_stream(
    tmp_root: Path, streams: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.client.bulk.memory.LEASES_MAX", 0)
    with serving_memory(tmp_root) as served:
        filled(served, TOKENS, KV, MEDIUM)
        with connected(served, bulk="shared") as store:
            assert read(store) == MEDIUM.layers
    assert streams == ["receive_layers"]


def test_a_hold_that_has_ended_gives_no_layers(served: Served) -> None:
    with connected(served, bulk="shared") as store, store.namespace("m", MEDIUM).hold(TOKENS) as hold:
        lease = hold._held._lease  # type: ignore[attr-defined]
        served.worker.service.holds.release(lease.id)
        with pytest.raises(HoldBroken):
            list(hold.layers())


def test_a_hold_that_is_released_in_the_middle_gives_no_more_layers(served: Served) -> None:
    with connected(served, bulk="shared") as store, store.namespace("m", MEDIUM).hold(TOKENS) as hold:
        layers = hold.layers()
        next(layers)
        hold.release()
        with pytest.raises(HoldBroken, match="released"):
            list(layers)


class Slow:
    """A file that is in no cache, on a root that hangs until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        real_run, real_read = LayerRun.read, PosixReader.read

        def blocked(run: LayerRun, *arguments: Any) -> Any:
            done, opened, mtimes_ns = real_run(run, *arguments)
            return done & (arguments[3] == 0), opened, mtimes_ns  # from the second band on

        def read(reader: PosixReader, *arguments: Any) -> int:
            if "as handed over" in reader._path:  # the client's
                self.reached.set()
                assert self.go.wait(WAIT_S)
            return real_read(reader, *arguments)

        monkeypatch.setattr(LayerRun, "read", blocked)
        monkeypatch.setattr(PosixReader, "read", read)


def test_layers_on_a_root_that_hangs_are_left_at_once_and_write_nothing_afterwards(
    tmp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = replace(MEDIUM, layers=2 * BAND_MAX)
    tokens, kv = tokens_and_kv(4, layout=layout)
    out = [np.zeros_like(kv[0]) for _ in range(layout.layers)]
    with serving(tmp_root) as served, connected(served, bulk="shared", limits=ClientLimits(read_s=WAIT_S)) as store:
        cache = store.namespace("m", layout)
        cache.put(tokens, kv)
        slow = Slow(monkeypatch)
        with cache.hold(tokens) as hold:
            layers: Any = hold.layers(out)
            next(layers)
            assert slow.reached.wait(WAIT_S)
            began_s = time.monotonic()
            layers.close()
            assert time.monotonic() - began_s < WAIT_S / 2, "it did not wait for the root"
            for array in out:
                array[...] = 0
            slow.go.set()
            eventually(lambda: not layer_threads(), "the thread ended")
        eventually(lambda: not [name for name in bulk_files_of(os.getpid()) if "/chunks/" in name], "no chunk is open")
        assert not any(array.view(np.uint8).any() for array in out)


def test_a_file_that_comes_too_late_is_not_counted_as_damaged(
    tmp_root: Path, monkeypatch: pytest.MonkeyPatch, streams: list[str]
) -> None:
    layout = replace(MEDIUM, layers=2 * BAND_MAX)
    tokens, kv = tokens_and_kv(4, layout=layout)
    limits = stretched(ClientLimits(read_s=1.0), "read_s")
    with serving(tmp_root) as served, connected(served, bulk="shared", limits=limits) as store:
        cache = store.namespace("m", layout)
        cache.put(tokens, kv)
        slow = Slow(monkeypatch)
        with cache.hold(tokens) as hold:
            layers: Any = hold.layers()
            next(layers)
            assert slow.reached.wait(WAIT_S)
            monkeypatch.undo()  # the worker reads well
            for layer, k, v in layers:
                assert same(k, kv[layer, 0]) and same(v, kv[layer, 1])
        slow.go.set()
        assert store.stats()["client_bulk_damaged"] == 0


def layer_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "kvstore-layers"]
