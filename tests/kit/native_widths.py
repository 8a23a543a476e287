"""The forms of native code, from plain to AVX-512: each is tested where the processor has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

WIDEST = 2

of_each_width = pytest.fixture(params=range(WIDEST + 1), ids=["plain", "avx2", "avx512"])
"""Makes a fixture of a function that takes ``request`` and uses ``narrowed``."""


@contextmanager
def narrowed(choose: Callable[[int], int], width: int) -> Iterator[int]:
    """Has native code use one form; ``choose`` returns the widest that there is up to the one it is asked for."""
    try:
        if choose(width) != width:
            pytest.skip("this processor has no such instructions")
        yield width
    finally:
        choose(WIDEST)
