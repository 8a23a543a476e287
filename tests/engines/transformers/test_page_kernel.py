"""The kernel moves pages of any size, of several groups, as ``torch`` does: on a GPU, else in Triton's interpreter.

Skipped where Triton is not installed: this environment is for CPUs.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton")

from kvstore.connectors.vllm.gpu_copy import Pages
from kvstore.connectors.vllm.page_kernel import PageKernel

COUNT = 9
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS = [(8, 8, 8), (5, 1, 2), (0, 3, 3), (7, 8, 0), (2, 2, 7)]
OTHERS = [(3, 0, 4), (8, 4, 5), (1, 5, 6), (4, 6, 1)]


def tensors(page_bytes: int, gap_bytes: int, offset_bytes: int, layers: int) -> list[torch.Tensor]:
    """One tensor of bytes for each layer: pages with a gap behind each, from an offset on."""
    made = []
    for _ in range(layers):
        raw = torch.randint(0, 256, (offset_bytes + COUNT * (page_bytes + gap_bytes),), dtype=torch.uint8)
        made.append(raw.to(DEVICE).as_strided((COUNT, page_bytes), (page_bytes + gap_bytes, 1), offset_bytes))
    return made


@pytest.mark.parametrize(
    ("page_bytes", "other_bytes", "gap_bytes", "offset_bytes"),
    [
        (64, 64, 0, 0),
        (64, 32, 8, 16),
        (64, 60, 4, 0),
        (60, 60, 0, 0),
        (64, 64, 0, 2),
        (62, 64, 0, 4),
        (63, 1, 0, 0),
        (64, 64, 1, 0),
        (40_000, 16_392, 8, 0),
    ],
)
def test_pages_are_moved_as_torch_moves_them(
    page_bytes: int, other_bytes: int, gap_bytes: int, offset_bytes: int
) -> None:
    layers = tensors(page_bytes, gap_bytes, offset_bytes, 3) + tensors(other_bytes, gap_bytes, offset_bytes, 2)
    pages = Pages([{"a": layers[0], "b": layers[1:3]}, {"c": layers[3]}, {"d": layers[4]}], COUNT)
    kernel = PageKernel(pages._views, pages._spans, pages._groups)
    pages._kernel = None

    numbers = pages._numbers(BLOCKS)[:, 1:]  # a part of more, as over the bus
    expected, rows = (torch.zeros((len(BLOCKS) - 1, pages.block_bytes), dtype=torch.uint8, device=DEVICE) for _ in "ab")
    pages._gather(numbers, expected)
    kernel.gather(numbers, rows.view(pages._word))
    assert expected.any() and torch.equal(rows, expected)

    before = [layer.clone() for layer in layers]
    pages._scatter(pages._numbers(OTHERS), rows)
    expected_layers = [layer.clone() for layer in layers]
    for layer, was in zip(layers, before, strict=True):
        layer.copy_(was)
    kernel.scatter(pages._numbers(OTHERS), rows.view(pages._word))
    assert all(torch.equal(*pair) for pair in zip(layers, expected_layers, strict=True))
