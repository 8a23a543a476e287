"""The steps of an engine that runs a plan: how much is prefilled in each, and how many prompts decode beside it.

An engine step has room for so many tokens: one for each prompt that decodes, the rest for prefill, in chunks. Prompts
begin in the plan's order, as soon as memory has room for what they do not share and for their output, rather than by a
number of requests (memory-centric token batching, arXiv 2412.03594).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from kvstore.errors import InvalidRequest
from kvstore.planning.plan import Plan, decoded


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an engine."""

    prefill: tuple[tuple[int, int], ...]
    """Prompts by index, and how many tokens of each are computed."""
    decoding: int
    """Prompts that decode one token each."""

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return self.decoding + sum(count for _, count in self.prefill)


def pack(
    plan: Plan, decode_tokens: int | Sequence[int | None], *, step_tokens: int, memory_tokens: int
) -> Iterator[Step]:
    """Yields the steps that run a plan, each of at most ``step_tokens``.

    ``decode_tokens`` are the output tokens of each prompt, by index, or of every one. ``memory_tokens`` is the KV for
    what prompts compute and put out, beside the plan's own for prefixes; a prompt that alone exceeds it runs alone.
    Raises InvalidRequest.
    """
    for name, value in (("step_tokens", step_tokens), ("memory_tokens", memory_tokens)):
        if value < 1:
            raise InvalidRequest(f"{name}={value!r}: expected 1 or more")
    outputs = decoded(len(plan.order), decode_tokens).tolist()
    work = (
        (index, computed)
        for group in plan.groups
        for index, computed in zip(group.members, group.computed, strict=True)
    )
    return _Packing(work, outputs, step_tokens, memory_tokens).steps()


class _Packing:
    """An engine, as far as its steps depend on it."""

    def __init__(
        self, work: Iterator[tuple[int, int]], outputs: Sequence[int], step_tokens: int, memory_tokens: int
    ) -> None:
        self._work = work
        self._outputs = outputs
        self._step_tokens = step_tokens
        self._memory_tokens = memory_tokens
        self._next = next(work, None)
        """The prompt to begin, and the tokens it computes."""
        self._begun: tuple[int, int, int] | None = None
        """The prompt that is being prefilled: index, tokens left, tokens of memory."""
        self._decoding: list[tuple[int, int]] = []
        """A heap of the prompts that decode: the step before which each has ended, and its memory."""
        self._in_use = 0
        self._now = 0

    def steps(self) -> Iterator[Step]:
        while self._next is not None or self._begun is not None or self._decoding:
            while self._decoding and self._decoding[0][0] <= self._now:
                self._in_use -= heappop(self._decoding)[1]
            decoding = len(self._decoding)
            prefill = tuple(self._prefill(self._step_tokens - decoding))
            if prefill or decoding:
                yield Step(prefill, decoding)
            self._now += 1

    def _prefill(self, room: int) -> Iterator[tuple[int, int]]:
        while room and (self._begun is not None or self._begin()):
            assert self._begun is not None
            index, left, memory = self._begun
            count = min(room, left)
            if count:
                yield index, count
            room -= count
            self._begun = (index, left - count, memory)
            if count == left:
                self._begun = None
                heappush(self._decoding, (self._now + 1 + self._outputs[index], memory))

    def _begin(self) -> bool:
        """Begins the next prompt, if there is one and room for it."""
        if self._next is None or len(self._decoding) >= self._step_tokens:
            return False
        index, computed = self._next
        memory = computed + self._outputs[index]
        if self._in_use and self._in_use + memory > self._memory_tokens:
            return False
        self._in_use += memory
        self._begun = (index, computed, memory)
        self._next = next(self._work, None)
        return True
