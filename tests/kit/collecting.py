"""Collectors that leave little of a root: the command line takes no bound under 1 MiB, which is much for a test."""

from __future__ import annotations

from kvstore.writes import BOUND_BYTES_MIN


def bounded_to(size_bytes: int, high: float = 0.9, low: float = 0.8) -> tuple[str, ...]:
    """The options of a ``kvstore-gc`` that does what it would do with this bound and these shares of it."""
    bound = max(BOUND_BYTES_MIN, size_bytes)
    shares = (f"{size_bytes * share / bound:.12f}" for share in (high, low))
    return ("--max-bytes", str(bound), "--high", next(shares), "--low", next(shares))
