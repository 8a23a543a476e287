"""Rows of bytes are copied whole, whatever their number, size and place, and nothing beside them changes."""

from __future__ import annotations

import weakref
from functools import partial

import numpy as np

from kvstore.client import remote
from kvstore.core.clock import SystemClock
from kvstore.core.executor import Deadline, Executor


def test_what_is_copied_lives_as_long_as_somebody_copies_it() -> None:
    """A late lane writes into memory that still exists, even if the arena was closed meanwhile."""
    clock, alive = SystemClock(), np.zeros(8, np.uint8)
    kept = weakref.ref(alive)
    lanes = Executor(1, 2, 8, 5, clock)
    at = np.array([alive.ctypes.data], np.uint64)
    try:
        batch = lanes.start(1, partial(remote._copy_step, alive, at, at, [(0, 8)]), helped=True)
        del alive
        assert kept() is not None
        batch.help(Deadline(clock, 30))
        batch.wait(Deadline(clock, 30))
        assert kept() is None
    finally:
        lanes.close()
