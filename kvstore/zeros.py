"""Arrays of zeros that take memory where they are written alone."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt


def untouched_zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Returns zeros in pages of their own, which the system gives as they are used.

    ``np.zeros`` does so for a process's first large arrays. Once one was freed, it takes memory from the heap and
    clears all of it: a millisecond for what a store begins with.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype).reshape(shape)
