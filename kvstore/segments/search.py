"""A search: the question that a client asks about the segments of a prompt; checked here, once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvstore.brief import brief
from kvstore.errors import InvalidRequest
from kvstore.tokens import TokenArray, Tokens, token_array

STARTS_MAX = 65_536

Range = tuple[int, int]
"""Start and end in the prompt, in tokens."""


@dataclass(frozen=True, slots=True)
class Search:
    """A prompt of tokens, shape ``(n,)``, and where its segments may begin. Made by ``of``."""

    tokens: TokenArray
    starts: tuple[int, ...] | None
    """The places where segments begin, ascending, each up to the next one or the end; None: anywhere."""
    after: int
    """Segments that begin before this place are left out: the length of the exact prefix."""

    @classmethod
    def of(cls, tokens: Tokens, starts: Sequence[int] | None = None, after: int = 0) -> Search:
        """Raises InvalidRequest for tokens that are none, and for places that are none of the prompt."""
        ids = token_array(tokens)
        try:
            place = operator.index(after)
        except TypeError as cause:
            raise InvalidRequest(f"after={brief(after)}: expected an integer") from cause
        if not 0 <= place <= len(ids):
            raise InvalidRequest(f"after={brief(place)}: expected 0 to {len(ids)}, the token count")
        return cls(ids, None if starts is None else _places(starts, len(ids)), place)

    @property
    def given(self) -> list[Range]:
        """The segments between ``starts``; those that begin before ``after`` are left out."""
        return [
            (start, end) for start, end in pairwise((*(self.starts or ()), len(self.tokens))) if start >= self.after
        ]


def _places(starts: Sequence[int], total: int) -> tuple[int, ...]:
    """Raises InvalidRequest for starts that are no integers, are too many, or do not ascend within the prompt."""
    try:
        places = tuple(operator.index(start) for start in starts)
    except TypeError as cause:
        raise InvalidRequest(f"starts are {brief(starts)}: expected a sequence of integers") from cause
    if len(places) > STARTS_MAX:
        raise InvalidRequest(f"{len(places)} starts are over the limit of {STARTS_MAX}")
    if any(start >= end for start, end in pairwise(places)) or (places and not 0 <= places[0] <= places[-1] <= total):
        raise InvalidRequest(f"starts are {brief(list(places[:8]))}...: expected ascending places from 0 to {total}")
    return places
