"""The page that a worker shares with a client: how many chunks of the current put the arena may forget."""

from __future__ import annotations

LEDGER_BYTES = 4096
COUNT_BITS = 32


def entry_value(request: int, count: int) -> int:
    """Returns the entry that says that ``count`` leading chunks of the put are released."""
    return request << COUNT_BITS | count


def released_count(entry: int, request: int) -> int:
    """Returns how many leading chunks of a put are released; 0 while the entry is still an older put's."""
    return entry & (1 << COUNT_BITS) - 1 if entry >> COUNT_BITS == request else 0
