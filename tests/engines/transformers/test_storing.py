"""Blocks that an adapter computed are stored only while its files are those that vLLM loaded; hints go with a put."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore.connectors.vllm.adapters import Seal
from kvstore.connectors.vllm.gpu_copy import Pages
from kvstore.connectors.vllm.metrics import EngineCounts
from kvstore.hints import Hints
from tests.kit.vllm_connector import BASE
from tests.kit.vllm_modules import vllm_modules


class Puts:
    """Block caches that note what they are given."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []

    def put(self, keys: list[bytes], buffers: list[Any], **more: Any) -> list[bool]:
        self.given.append({"keys": keys, **more})
        return [True] * len(keys)


@pytest.fixture
def modules() -> Iterator[None]:
    empty = {"KVConnectorMetadata": object, "KVConnectorWorkerMetadata": object}
    with vllm_modules({BASE: empty, "torch": vars(torch)}):
        yield


@pytest.mark.usefixtures("modules")
def test_what_was_computed_is_not_stored_once_the_files_changed(tmp_path: Path) -> None:
    from kvstore.connectors.vllm.blocks import Run
    from kvstore.connectors.vllm.worker import Storer

    (tmp_path / "adapter_model.safetensors").write_bytes(b"1")
    seal, puts = Seal.of(str(tmp_path)), Puts()
    pages = Pages([{"layer": torch.zeros((9, 64), dtype=torch.uint8)}], 9)
    storer = Storer(
        SimpleNamespace(caches=lambda: [puts]),  # type: ignore[arg-type]
        [pages],
        EngineCounts(),
        bytes_max=1 << 20,
        pause_s=1.0,
    )
    storer.store(Run(0, [b"first"], [(1,)], 4, seal, Hints(80, 300)))
    storer.close(10.0)
    assert puts.given == [{"keys": [b"first"], "first": 4, "descents": [], "priority": 80, "ttl": 300}]

    (tmp_path / "adapter_model.safetensors").write_bytes(b"22")
    storer = Storer(
        SimpleNamespace(caches=lambda: [puts]),  # type: ignore[arg-type]
        [pages],
        EngineCounts(),
        bytes_max=1 << 20,
        pause_s=1.0,
    )
    storer.store(Run(0, [b"second"], [(2,)], 5, seal))
    storer.store(Run(0, [b"third"], [(3,)], 6))
    storer.close(10.0)
    third = {"keys": [b"third"], "first": 6, "descents": [], "priority": Hints().priority, "ttl": math.inf}
    assert puts.given[1:] == [third]
