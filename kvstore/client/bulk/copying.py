"""Copying into memory shared with a worker: several lanes, past the caches, without the GIL.

Separate from sending, because chunks and blocks are copied alike: rows of bytes, each from one address to another.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvstore.native import library as native
from kvstore.node.lanes import Deadline, Lanes

STEP_BYTES = 4 << 20
"""Bytes that one lane copies at a time: a fraction of a millisecond."""
PAGE_BYTES = 4096

Addresses = npt.NDArray[np.uint64]


def copy_rows(
    to: Addresses, source: Addresses, row_bytes: int, alive: object, lanes: Lanes, deadline: Deadline
) -> None:
    """Copies ``row_bytes`` bytes from each address in ``source`` to the one in ``to``; both have shape ``(rows,)``.

    ``alive`` owns the memory: a lane that is still copying at the deadline keeps a reference to it. Raises
    DeadlinePassed, Overloaded, Unavailable.
    """
    rows = len(to)
    if not rows or not row_bytes:
        return
    # Each step takes whole pages of every row, so the number of rows does not matter.
    pages = -(-row_bytes // PAGE_BYTES)
    steps = max(1, min(pages, rows * row_bytes // STEP_BYTES))
    starts = [step * pages // steps * PAGE_BYTES for step in range(steps)]
    spans = list(pairwise([*starts, row_bytes]))
    lanes.share(steps, partial(_copy_step, alive, to, source, spans), deadline)


def _copy_step(_: object, to: Addresses, source: Addresses, spans: list[tuple[int, int]], step: int) -> bool:
    (start, stop), at = spans[step], [each.__array_interface__["data"][0] for each in (to, source)]
    native.library.kv_copy_rows(*at, len(to), start, stop - start)
    return True
