"""SGLang's own file backend in the cases of docs/comparison.md, which says of it what happens here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

KEY = "a" * 64


def file_backend(folder: Path, *, tp_size: int = 1) -> Any:
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=tp_size,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="a-model",
        extra_config={"file_storage_path": str(folder)},
    )
    return HiCacheFile(config)


def stored(folder: Path) -> tuple[Any, torch.Tensor, Path]:
    backend, page = file_backend(folder), torch.arange(64, dtype=torch.float16)
    assert backend.set(KEY, page)
    (file,) = folder.glob("*.bin")
    return backend, page, file


def test_a_flipped_bit_is_served_as_a_hit(tmp_path: Path) -> None:
    backend, page, file = stored(tmp_path)
    damaged = bytearray(file.read_bytes())
    damaged[0] ^= 1
    file.write_bytes(damaged)
    found = backend.get(KEY, torch.zeros_like(page))
    assert found is not None and not torch.equal(found, page)


def test_a_file_cut_short_is_found_cannot_be_read_and_is_not_stored_again(tmp_path: Path) -> None:
    backend, page, file = stored(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    for _ in range(2):
        assert backend.exists(KEY)
        with pytest.raises(OSError, match="Short read"):
            backend.get(KEY, torch.zeros_like(page))
        assert backend.set(KEY, page)  # skipped: the file exists


def test_another_dtype_of_the_same_size_is_served_as_a_hit(tmp_path: Path) -> None:
    stored(tmp_path)
    found = file_backend(tmp_path).get(KEY, torch.zeros(64, dtype=torch.bfloat16))
    assert found is not None and found.dtype == torch.bfloat16


def test_another_parallel_size_has_other_files(tmp_path: Path) -> None:
    stored(tmp_path)
    assert not file_backend(tmp_path, tp_size=2).exists(KEY)


def test_nothing_is_deleted_unless_a_size_is_given(tmp_path: Path) -> None:
    backend, page, _ = stored(tmp_path)
    for number in range(64):
        assert backend.set(f"{number:064x}", page)
    assert len(list(tmp_path.glob("*.bin"))) == 65
