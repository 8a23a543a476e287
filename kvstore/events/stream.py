"""The batches of one topic: their sequence numbers, and those that are kept for subscribers who missed some. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvstore.events.limits import EventLimits

TERM_BITS = 24
"""A speaker's numbers begin at its term times 2 to this: they are larger than those of all speakers before it."""
END = (1 << 64) - 1
"""The number that ends a replay, as vLLM has it: -1."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One encoded batch and its number."""

    seq: int
    payload: bytes


class Stream:
    """One topic of one speaker. ``term`` is the revision at which it was elected. Used by one thread."""

    def __init__(self, term: int, limits: EventLimits) -> None:
        self._next = term << TERM_BITS
        self._limits = limits
        self._kept: deque[Batch] = deque()
        self._kept_bytes = 0

    @property
    def last(self) -> int:
        """The number of the last batch; there is one."""
        return self._next - 1

    def add(self, payload: bytes) -> Batch:
        """Numbers a batch, and keeps it for a while."""
        batch = Batch(self._next, payload)
        self._next += 1
        self._kept.append(batch)
        self._kept_bytes += len(payload)
        while len(self._kept) > self._limits.replay_batches or self._kept_bytes > self._limits.replay_bytes:
            self._kept_bytes -= len(self._kept.popleft().payload)
        return batch

    def since(self, seq: int) -> list[Batch] | None:
        """Returns all batches from a number on; None if that has to be a snapshot.

        It has to if batches are not kept any more, or are another speaker's.
        """
        if not self._kept or not self._kept[0].seq <= seq <= self._next:
            return None
        return [batch for batch in self._kept if batch.seq >= seq]
