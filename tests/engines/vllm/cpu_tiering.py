"""Lets vLLM's tiered offloading run on a CPU: its scheduler side as it is, the copies between GPU and CPU by memcpy.

vLLM's own copy worker refuses the CPU platform. Loaded by vLLM as ``spec_name`` with ``spec_module_path``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks between the engine's KV memory and the chunks of the CPU cache, at once."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: Any) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._ended: list[Any] = []
        self._groups = kv_caches.group_data_refs
        self._pairs = [
            (
                each.tensor.view(torch.int8).view(-1, each.page_size_bytes),
                region.create_next_worker_view(each.page_size_bytes * blocks_per_chunk),
            )
            for each in kv_caches.tensors
        ]

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, out=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, out=False)

    def get_finished(self) -> list[Any]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: Collection[int]) -> None:
        """Does nothing: no copy is ever in progress."""

    def shutdown(self) -> None:
        if self._region is not None:
            self._pairs.clear()
            self._region.cleanup()
            self._region = None

    def _copy(self, job_id: int, blocks: Any, chunks: Any, *, out: bool) -> bool:
        size, block_ids, chunk_ids = 0, list(blocks.block_ids), list(chunks.block_ids)
        for group, count, first in zip(self._groups, blocks.group_sizes, blocks.block_indices, strict=True):
            if not count:
                continue
            skipped = int(first) % self._blocks_per_chunk
            for index in range(skipped, skipped + count):
                chunk, part = chunk_ids[index // self._blocks_per_chunk], index % self._blocks_per_chunk
                size += self._copy_block(group, block_ids[index - skipped], chunk, part, out=out)
            del block_ids[:count], chunk_ids[: (skipped + count - 1) // self._blocks_per_chunk + 1]
        assert not block_ids and not chunk_ids
        self._ended.append(TransferResult(job_id=job_id, success=True, transfer_size=size, transfer_time=1e-6))
        return True

    def _copy_block(self, group: Any, block: int, chunk: int, part: int, *, out: bool) -> int:
        """Copies the pages of one block in a group's layers, without the padding behind them."""
        for layer in group:
            engine, cache = self._pairs[layer.tensor_idx]
            start = part * engine.shape[1]
            inside = cache[chunk, start : start + layer.page_size_bytes]
            page = engine[block, : layer.page_size_bytes]
            (inside if out else page).copy_(page if out else inside)
        return sum(layer.page_size_bytes for layer in group)


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """``TieringOffloadingSpec`` with the worker above."""

    def get_worker(self, kv_caches: Any) -> CopyWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker: CopyWorker | None = CopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
