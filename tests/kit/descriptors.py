"""Counts of this process's descriptors, for tests that none is left."""

from __future__ import annotations

import gc
import os


def open_before() -> int:
    """Returns the open descriptors once the garbage of earlier tests is gone, which would close some later."""
    gc.collect()
    return open_now()


def open_now() -> int:
    """Returns the open descriptors; compare with ``<=``: threads of earlier tests may close theirs meanwhile."""
    return len(os.listdir("/proc/self/fd"))
