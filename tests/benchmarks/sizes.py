"""Sizes so small that a benchmark ends at once: its figures mean nothing, its checks do."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.load import Model
from benchmarks.harness.options import Options

TINY = Model("tiny", 2, 1, 64, 10_000_000)
"""512 bytes a token, and a prefill that takes no time."""


def tiny_options(folder: Path) -> Options:
    """One round in a folder."""
    return Options(folder, folder, 1, quick=True)
