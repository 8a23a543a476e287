"""The pages of an engine out of and into a GPU, beside one plain copy of the same bytes, and beside matrix products."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.contents import WrongBytes
from benchmarks.gpu_model import Shape, wait
from benchmarks.result import Cell, Table
from benchmarks.rounds import GIB, in_turns
from kvstore.connectors.vllm.gpu_copy import PART_BYTES, Copy, Pages

BLOCK_TOKENS = 16
LEAVING = 4
"""Parts that are on their way to the host at once."""
QUEUED = 3
"""Matrix products that wait for the device."""


class Moves:
    """The pages of one prompt in an engine's KV tensors, and one contiguous copy of as many bytes."""

    def __init__(self, shape: Shape, device: torch.device, tokens: int) -> None:
        count = tokens // BLOCK_TOKENS
        page = (count, 2, BLOCK_TOKENS, shape.kv_heads, shape.head)
        self._device = device
        self._tensors = [torch.randn(page, device=device).to(shape.dtype) for _ in range(shape.layers)]
        self.pages = Pages([{f"layer {at}": each for at, each in enumerate(self._tensors)}], count)
        order = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(1), device="cpu").tolist()
        self.blocks = [(block,) for block in order]
        self.size_bytes = count * self.pages.block_bytes
        self.host = self.pages.host(count)
        self._plain = torch.empty_like(self.host, device=device)
        self._start = self.pages.now()

    def plain_out(self) -> float:
        """Seconds of one copy to pinned memory."""
        return self._timed(lambda: self.host.copy_(self._plain, non_blocking=True))

    def plain_in(self) -> float:
        """Seconds of one copy from pinned memory."""
        return self._timed(lambda: self._plain.copy_(self.host, non_blocking=True))

    def pages_out(self) -> float:
        """Seconds until all pages are on the host."""
        return self._timed(self.move_out)

    def pages_in(self) -> float:
        """Seconds until all pages are where the engine reads them."""
        return self._timed(self.move_in)

    def check(self) -> None:
        """Raises WrongBytes if pages do not come back as they went."""
        before = [each.clone() for each in self._tensors]
        rows = torch.from_numpy(self.pages.copy_out(self.blocks).rows()).clone()
        for each in self._tensors:
            each.zero_()
        self.pages.write(rows, self.blocks, self.pages.now())
        if not all(torch.equal(each, was) for each, was in zip(self._tensors, before, strict=True)):
            raise WrongBytes("pages came back otherwise than they went")

    def beside(self, work: Callable[[], object] | None) -> tuple[float, float]:
        """Matrix products a second on the device while ``work`` goes on in another thread, and times of ``work``.

        As in an engine, some are queued ahead, and nothing waits for the device but for their own stream.
        """
        size = 8192 if self._device.type == "cuda" else 128
        left = torch.randn(size, size, device=self._device, dtype=self._tensors[0].dtype)
        ends, done, moved, queued = threading.Event(), 0, 0, deque[Any]()

        def repeat() -> None:
            nonlocal moved
            while work is not None and not ends.is_set():
                work()
                moved += 1

        thread = threading.Thread(target=repeat)
        thread.start()
        began_s = time.perf_counter()
        while time.perf_counter() - began_s < (2.0 if self._device.type == "cuda" else 0.2):
            left @ left
            done += 1
            if self._device.type == "cuda":
                queued.append(torch.cuda.current_stream(self._device).record_event())
                if len(queued) > QUEUED:
                    queued.popleft().synchronize()
        while queued:
            queued.popleft().synchronize()
        took_s = time.perf_counter() - began_s
        ends.set()
        rates = done / took_s, moved / took_s
        thread.join()
        return rates

    def move_out(self) -> None:
        """Moves all pages to the host, some at once, as the steps of an engine do."""
        size, leaving = max(1, PART_BYTES // self.pages.block_bytes), deque[Copy]()
        for start in range(0, len(self.blocks), size):
            leaving.append(self.pages.copy_out(self.blocks[start : start + size]))
            if len(leaving) > LEAVING:
                leaving.popleft().rows()
        while leaving:
            leaving.popleft().rows()

    def move_in(self) -> None:
        """Moves all pages to where the engine reads them."""
        self.pages.write(self.host, self.blocks, self._start)

    def _timed(self, work: Callable[[], object]) -> float:
        wait(self._device)
        began_s = time.perf_counter()
        work()
        wait(self._device)
        return time.perf_counter() - began_s


def moves(shape: Shape, device: torch.device, tokens: int, rounds: int) -> Table:
    """Pages beside plain copies, and what a matrix product loses."""
    made = Moves(shape, device, tokens)
    made.check()
    ways = {
        "pinned copy out": made.plain_out,
        "pages out": made.pages_out,
        "pinned copy in": made.plain_in,
        "pages in": made.pages_in,
    }
    found = in_turns(ways, rounds)
    rows: list[list[Cell]] = []
    for way in ways:
        plain = f"pinned copy {way.split()[-1]}"
        rate = median(made.size_bytes / GIB / each[way] for each in found)
        rows.append([way, rate, median(each[plain] / each[way] for each in found), None, None])
    products = {
        "none": lambda: made.beside(None),
        "pages out": lambda: made.beside(made.move_out),
        "pages in": lambda: made.beside(made.move_in),
    }
    beside = in_turns(products, rounds)
    for row in rows:
        if row[0] in products:
            row[3] = median(each[str(row[0])][1] for each in beside) * made.size_bytes / GIB
            row[4] = 100 * (1 - median(each[str(row[0])][0] / each["none"][0] for each in beside))
    title = f"{made.size_bytes / 1e6:,.0f} MB in {len(made.blocks):,} blocks of {shape.layers} layers"
    columns = ("", "GiB/s", "of a pinned copy", "beside products GiB/s", "which lose %")
    return Table(title, columns, rows)
