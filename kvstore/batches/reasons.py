"""Why requests of a batch have no answer: the first few of each kind are told at once, and all are counted.

Apart from ``sending``: a run of a million requests that the server calls wrong must stay readable.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

from kvstore.parsing import parse_json

TOLD_MAX = 3
"""Requests of one kind that are told."""
MESSAGE_CHARS_MAX = 200
NAME_CHARS_MAX = 80

Tell = Callable[[str], None]
"""Shows one line to the user. The server's text is in it, which may have any character."""


class Reasons:
    """Counts requests without an answer by kind, such as ``status 400``."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._counts: Counter[str] = Counter()

    def add(self, custom_id: str, kind: str, message: str) -> None:
        """Counts a request. ``message`` is the server's, or that of an error."""
        self._counts[kind] += 1
        if self._counts[kind] <= TOLD_MAX:
            self._tell(f"request {_cut(custom_id, NAME_CHARS_MAX)!r}: {kind}{message and ': '}{message}")

    def tell_counts(self) -> None:
        """Tells how many requests each kind has."""
        for kind, count in sorted(self._counts.items()):
            self._tell(f"{count:,} request{'s' * (count > 1)} in all: {kind}")


def message_of(body: bytes) -> str:
    """The message in an answer that is an error, on one line, cut where it is long; empty if there is none.

    OpenAI has it in ``error.message``, vLLM in ``message``, FastAPI in ``detail``.
    """
    try:
        said = parse_json(body)
        for name in ("error", "message", "detail"):
            if isinstance(said, dict) and name in said:
                said = said[name]
        text = said if isinstance(said, str) else json.dumps(said)
    except ValueError:
        text = body[: 4 * MESSAGE_CHARS_MAX].decode(errors="replace")
    return _cut(" ".join(text.split()), MESSAGE_CHARS_MAX)


def _cut(text: str, chars_max: int) -> str:
    return text if len(text) <= chars_max else f"{text[:chars_max]}..."
