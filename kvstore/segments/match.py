"""A found range of a prompt: the leading chunks of one stored segment."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.tokens import TokenArray


@dataclass(frozen=True, slots=True)
class Match:
    """Tokens ``start`` to ``end`` (exclusive) of a prompt are the first tokens of a stored segment.

    ``end - start`` is a multiple of the chunk length. ``tokens`` are those of the range, shape ``(end - start,)``.
    """

    start: int
    end: int
    tokens: TokenArray = field(repr=False, compare=False)

    def __len__(self) -> int:
        return self.end - self.start

    def leading(self, count: int) -> Match:
        """The first ``count`` tokens of it."""
        return Match(self.start, self.start + count, self.tokens[:count])
