"""The benchmark of a GPU runs small on a CPU, and finds wrong KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import SMALL, Moves, Prefill, opened
from benchmarks.harness import report
from benchmarks.harness.load import WrongBytes
from kvstore.connectors.vllm.gpu_copy import Pages


def test_it_prints_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results"
    told = ["--rounds", "1", "--tokens", "512", "--blended", "1024", "--root", str(tmp_path), "--save", str(results)]
    assert gpu.main(["--small", *told]) == 0
    printed = capsys.readouterr().out
    assert "pages in" in printed and "| 512 |" in printed.replace("|    512 |", "| 512 |")
    assert list(tmp_path.iterdir()) == [results]
    (results / "gpu-small.json").rename(results / "gpu.json")
    assert report.main([str(results)]) == 0
    page = (tmp_path / "RESULTS.md").read_text()
    assert "## gpu-small" in page and "pages out" in page and "Hypothesis.** pages come and go" in page


def test_pages_that_come_back_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = Moves(SMALL, torch.device("cpu"), 256)
    moves.check()
    write = Pages.write

    def twisted(pages: Pages, source: Any, blocks: list[tuple[int]], after: Any) -> None:
        write(pages, source, blocks[::-1], after)

    monkeypatch.setattr(Pages, "write", twisted)
    with pytest.raises(WrongBytes):
        moves.check()


def test_a_token_that_differs_is_found(tmp_path: Path) -> None:
    prefill = Prefill(SMALL, torch.device("cpu"), 512)
    asked = prefill.prompt(512, 0)
    with opened(tmp_path, 0) as store:
        prefill.first_token_s(asked, store)
        prefill.first_token_s(asked, store, is_warm=True)
        with pytest.raises(WrongBytes, match="bytes were loaded"):
            prefill.first_token_s(prefill.prompt(512, 1), store, is_warm=True)
        prefill._computed[0][0][0, 0, 0] += 1
        with pytest.raises(WrongBytes, match="had not computed"):
            prefill.first_token_s(asked, store, is_warm=True)
        for parameter in prefill.model.parameters():
            parameter.data = torch.randn_like(parameter)
        with pytest.raises(WrongBytes, match="without a store"):
            prefill.first_token_s(asked, None)
