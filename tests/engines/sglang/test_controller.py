"""SGLang's real cache controller and host pools, on our storage backend: pages come back bit for bit, or are a miss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from sglang.srt.mem_cache.hicache_storage import PoolName

from kvstore.connectors.common import EngineSettings
from kvstore.engine.settings import Limits
from kvstore.root.posix import PosixRoot
from tests.engines.sglang.on_cpu import StorageMetricsCollector, cache_controller
from tests.engines.sglang.rank import PAGE, Rank, device_pool, holds, host_pool, page_keys, taken
from tests.kit.faulty_root import FaultyRoot, Hang, Rule
from tests.kit.stores import chunk_files, flip, store_on

PROMPT = list(range(100, 100 + 5 * PAGE))
OTHER = PROMPT[: 3 * PAGE] + [7] * 2 * PAGE
"""A prompt with the same first three pages."""
LAYOUTS = {
    "mha": ("layer_first", "page_first", "page_first_direct", "page_head"),
    "mla": ("layer_first", "page_first", "page_first_direct"),
}


def empty(layout: str = "page_first", kind: str = "mha", extra: dict[str, Any] | None = None, **told: Any) -> Rank:
    """A rank of a model with one host pool, which is empty."""
    device = device_pool(kind)
    return Rank({PoolName.KV: host_pool(device, layout)}, extra or {}, device, **told)


@pytest.mark.smoke
@pytest.mark.parametrize("calls", ["in place", "generic"])
@pytest.mark.parametrize(("kind", "layout"), [(kind, layout) for kind, each in LAYOUTS.items() for layout in each])
@pytest.mark.parametrize("hybrid", [False, True], ids=["base", "hybrid"])
def test_what_one_controller_backs_up_the_next_one_prefetches(
    tmp_root: Path, kind: str, layout: str, calls: str, hybrid: bool
) -> None:
    extra = {"root": str(tmp_root), "interface_v1": int(calls == "in place")}
    with empty(layout, kind, extra, hybrid=hybrid) as rank:
        assert rank.prefetch(PROMPT) == 0
        assert rank.back_up(PROMPT) == len(PROMPT)
    with empty(layout, kind, extra, hybrid=hybrid) as rank:
        assert rank.prefetch(PROMPT) == len(PROMPT)
        assert rank.prefetch(OTHER) == 3 * PAGE


@pytest.mark.parametrize("says_prefixes", [False, True])
def test_a_prompt_that_grows_is_stored_and_found_whole(tmp_root: Path, says_prefixes: bool) -> None:
    """SGLang backs up the new pages of a prompt alone, after those that it stored before."""
    with empty(extra={"root": str(tmp_root)}, says_prefixes=says_prefixes) as rank:
        assert rank.back_up(PROMPT[: 2 * PAGE]) == 2 * PAGE
        assert rank.prefetch(PROMPT) == 2 * PAGE
        assert rank.back_up(PROMPT, first=2) == 3 * PAGE
        assert rank.prefetch(PROMPT) == 5 * PAGE


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_damage_ends_a_prefetch_and_is_not_found_again(tmp_root: Path, layout: str) -> None:
    with empty(layout, extra={"root": str(tmp_root)}) as rank:
        rank.back_up(PROMPT[: 2 * PAGE])
        before = set(chunk_files(tmp_root))
        rank.back_up(PROMPT[: 3 * PAGE], first=2)
        victim = min(set(chunk_files(tmp_root)) - before)
        rank.back_up(PROMPT, first=3)
        flip(victim, -3)
        operation = rank.ask(PROMPT)
        assert operation.storage_hit_count == 5 * PAGE, "nobody has read it yet"
        rank.read(operation)
        assert rank.results(operation)[0] == 2 * PAGE
        assert holds(rank.kv, operation.host_indices[: 2 * PAGE], page_keys(PROMPT)[:2])
        assert rank.ask(PROMPT).storage_hit_count == 2 * PAGE
        assert rank.back_up(PROMPT, first=2) == 3 * PAGE
        assert rank.prefetch(PROMPT) == 5 * PAGE


@pytest.fixture
def faulty(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyRoot]:
    root = FaultyRoot(PosixRoot(tmp_root))
    monkeypatch.setattr(EngineSettings, "open", lambda _: store_on(root, Limits(io_threads=4, width=2)))
    yield root
    root.set_rules([])


def test_a_prefetch_that_is_terminated_ends_with_the_batch_that_is_read(
    faulty: FaultyRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_controller, "STORAGE_BATCH_SIZE", 2)
    with empty(extra={"root": "faulty"}) as rank:
        assert rank.back_up(PROMPT) == len(PROMPT)
    with empty(extra={"root": "faulty"}) as rank:
        operation, hang = rank.ask(PROMPT), Hang()
        assert operation.storage_hit_count == len(PROMPT)
        faulty.set_rules([Rule("read", hang)])
        rank.read(operation)
        assert hang.reached.wait(60)
        rank.controller.terminate_prefetch(operation)
        faulty.set_rules([])
        hang.release.set()
        assert rank.results(operation)[0] == 2 * PAGE
        assert holds(rank.kv, operation.host_indices[: 2 * PAGE], page_keys(PROMPT)[:2])
        assert not rank.kv.kv_buffer[:, operation.host_indices[2 * PAGE :]].any(), "nothing after it was read"
        rank.kv.free(operation.host_indices)
        assert rank.prefetch(PROMPT) == len(PROMPT)


def counted(name: str) -> float:
    return REGISTRY.get_sample_value(f"sglang:{name}", {"rank": "0"}) or 0.0


def test_sglangs_own_metrics_take_what_the_backend_counts(tmp_root: Path) -> None:
    collector = StorageMetricsCollector({"rank": "0"})
    with empty(extra={"root": str(tmp_root)}) as rank:
        rank.back_up(PROMPT)
        rank.prefetch(PROMPT)
        keys = page_keys(PROMPT)
        assert rank.backend.batch_get_v1(["absent"], rank.kv.alloc(PAGE)) == [False]
        collector.log_storage_metrics(rank.backend.get_stats())
        for call in ("backup", "prefetch"):
            assert counted(f"{call}_pgs_count") == 1
            assert counted(f"{call}_pgs_sum") == 5
            assert counted(f"{call}_bandwidth_sum") > 0
        collector.log_storage_metrics(rank.backend.get_stats())
        assert counted("backup_pgs_count") == 1, "each call is told once"
        assert rank.backend.batch_get_v1([*keys[:2], "absent"], rank.kv.alloc(3 * PAGE)) == [True, True, False]
        assert rank.backend.get_stats().prefetch_pgs == [2], "what found nothing moved nothing"


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_pages_whose_v_is_wider_than_k_come_back(tmp_root: Path, layout: str) -> None:
    """Their pools have no flat pages, so their bytes are looked at by layer."""
    read = []
    for calls in ("write", "read"):
        with empty(layout, "wide", {"root": str(tmp_root)}) as rank:
            layers = [*rank.kv.k_data_refs, *rank.kv.v_data_refs]
            if calls == "write":
                for number, layer in enumerate(layers):
                    layer.copy_(torch.arange(layer.numel()).reshape(layer.shape) % 199 + number)
                rank.controller.write_storage(rank.kv.alloc(len(PROMPT)), PROMPT, page_keys(PROMPT))
                assert taken(rank.controller.ack_backup_queue).completed_tokens == len(PROMPT)
            else:
                operation = rank.ask(PROMPT)
                rank.read(operation)
                assert rank.results(operation)[0] == len(PROMPT)
                assert operation.host_indices.tolist() == [*range(len(PROMPT))]
            rows = len(PROMPT) // (PAGE if layout == "page_first_direct" else 1)
            read.append(torch.cat([layer[:rows].flatten() for layer in layers]))
    assert read[0].any() and read[0].equal(read[1])
