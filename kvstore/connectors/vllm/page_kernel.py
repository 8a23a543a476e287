"""The pages of all layers of some blocks moved by one launch on a GPU; ``torch`` takes one for each layer.

A launch takes microseconds, in which a part of 64 MiB could be moved. With one launch for each layer, a concurrent
matrix product loses twice as much time, and loads wait for each launch (``benchmarks/gpu.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

AT_ONCE = tl.constexpr(2_048)
"""Words that one program moves at a time."""
WORDS = {torch.int64: tl.int64, torch.int32: tl.int32, torch.int16: tl.int16, torch.uint8: tl.uint8}


class PageKernel:
    """Moves pages between views of layers, of shape (blocks, words), and rows in which those of a block lie together.

    ``spans`` are the places of the views in a row, in words, and ``groups`` the group of each.
    """

    def __init__(self, views: Sequence[Any], spans: Sequence[slice], groups: Sequence[int]) -> None:
        self._word = WORDS[views[0].dtype]
        bytes_each = views[0].element_size()
        columns = [
            [view.data_ptr() for view in views],
            [view.stride(0) * bytes_each for view in views],
            [view.shape[1] for view in views],
            [span.start for span in spans],
            list(groups),
        ]
        self._columns = torch.tensor(columns, dtype=torch.int64, device=views[0].device)

    def gather(self, numbers: Any, words: Any) -> None:
        """Copies the pages of these blocks, numbered by group, into rows; on the current stream."""
        self._move(numbers, words, into_rows=True)

    def scatter(self, numbers: Any, words: Any) -> None:
        """Copies rows to the pages of these blocks; on the current stream."""
        self._move(numbers, words, into_rows=False)

    def _move(self, numbers: Any, words: Any, *, into_rows: bool) -> None:
        grid = (words.shape[0], self._columns.shape[1])
        columns, word = self._columns, self._word
        _page[grid](columns, numbers, numbers.stride(0), words, words.stride(0), WORD=word, INTO_ROWS=into_rows)


# Compiled once for each direction, whatever the number of blocks: an engine's step would wait for another variant.
@triton.jit(do_not_specialize=["numbers", "numbers_stride", "row_words"])  # type: ignore[untyped-decorator]
def _page(columns, numbers, numbers_stride, rows, row_words, WORD: tl.constexpr, INTO_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Moves one page: that of row ``program_id(0)`` in view ``program_id(1)``."""
    row, view, views = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    first = tl.load(columns + view)
    stride = tl.load(columns + views + view)
    width = tl.load(columns + 2 * views + view)
    span = tl.load(columns + 3 * views + view)
    group = tl.load(columns + 4 * views + view)
    number = tl.load(numbers + group * numbers_stride + row)
    page = (first + number * stride).to(tl.pointer_type(WORD))
    place = rows + row * row_words + span
    for start in range(0, width, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        if INTO_ROWS:
            tl.store(place + at, tl.load(page + at, mask=at < width), mask=at < width)
        else:
            tl.store(page + at, tl.load(place + at, mask=at < width), mask=at < width)
