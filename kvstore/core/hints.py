"""Hints: a writer's word on how long its chunks are worth keeping.

Separate from recency, which carries them in an mtime, because they are part of the public interface. Hints steer
what garbage collection takes first; they protect nothing (that is what pins are for), and may be lost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from types import MappingProxyType
from typing import Literal, SupportsIndex, cast

from kvstore.core.text import brief
from kvstore.core.validate import FLOAT_MAX, number
from kvstore.errors import InvalidRequest

Preset = Literal["chat", "analytics", "rag", "batch"]
PRIORITY_DEFAULT = 35
PRIORITY_MAX = 100
TTL_CLASSES_S = (300, 1_800, 7_200, 43_200, 259_200, 2_592_000)
"""5 minutes, 30 minutes, 2 hours, 12 hours, 3 days, 30 days: a ttl is kept as one of these, or as none."""
_TTL_CLASSES = frozenset(TTL_CLASSES_S)
_PRIORITIES = range(PRIORITY_MAX + 1)


@dataclass(frozen=True, slots=True)
class Hints:
    """The time that chunks are worth keeping. ``of`` makes them from any ttl. Raises InvalidRequest."""

    priority: int = PRIORITY_DEFAULT
    """0 to 100: where room is needed, chunks of lower priority go first."""
    ttl_s: int | None = None
    """Seconds since the last use after which they may go even if there is room; None: never. One of the classes."""

    def __post_init__(self) -> None:
        # Each put and each look at a chunk's time makes one: what is right costs two look-ups.
        if type(self.priority) is not int or self.priority not in _PRIORITIES:
            object.__setattr__(self, "priority", _checked_priority(self.priority))
        if self.ttl_s is not None and (type(self.ttl_s) is not int or self.ttl_s not in _TTL_CLASSES):
            raise InvalidRequest(
                f"ttl_s={brief(self.ttl_s)}: expected one of {', '.join(map(str, TTL_CLASSES_S))}, or None; Hints.of "
                "rounds others up"
            )

    @classmethod
    def of(
        cls, priority: SupportsIndex | None = None, ttl_s: float | None = None, preset: Preset | None = None
    ) -> Hints:
        """Hints from a caller's arguments: explicit values win over those of ``preset``.

        ``ttl_s`` is rounded up to the next class, so nothing goes earlier than asked for; over 30 days (``math.inf``
        too) is none.  Raises InvalidRequest.
        """
        base = PRESETS[checked_preset(preset)] if preset is not None else DEFAULT
        if priority is None and ttl_s is None:
            return base
        return cls(
            base.priority if priority is None else cast("int", priority),  # making them checks it
            base.ttl_s if ttl_s is None else _ttl_class(ttl_s),
        )

    def raised_to(self, other: Hints) -> Hints:
        """The higher priority and the longer ttl of both."""
        ttl_s = None if self.ttl_s is None or other.ttl_s is None else max(self.ttl_s, other.ttl_s)
        return Hints(max(self.priority, other.priority), ttl_s)

    def covers(self, other: Hints) -> bool:
        """True if raising to ``other`` would change nothing."""
        lasts = self.ttl_s is None or (other.ttl_s is not None and other.ttl_s <= self.ttl_s)
        return lasts and other.priority <= self.priority


DEFAULT = Hints()
LEAST = Hints(0, TTL_CLASSES_S[0])
"""The weakest hints: all others cover them."""

PRESETS: Mapping[Preset, Hints] = MappingProxyType(
    {
        # A conversation goes on within minutes to hours, or not at all; a user waits for it then.
        "chat": Hints(priority=50, ttl_s=43_200),
        # The same tables and reports are asked about by many, for as long as they are current.
        "analytics": Hints(priority=60, ttl_s=259_200),
        # A document of a shared corpus serves every question that retrieves it, until the corpus changes.
        "rag": Hints(priority=70, ttl_s=2_592_000),
        # Each prompt is used once; only what the prompts of one run share is used again, and soon.
        "batch": Hints(priority=10, ttl_s=1_800),
    }
)


def checked_preset(name: str) -> Preset:
    """Returns ``name`` as a preset. Raises InvalidRequest."""
    for each in PRESETS:
        if isinstance(name, str) and each == name:  # an array would be compared item by item
            return each
    raise InvalidRequest(f"preset={brief(name)}: expected one of {', '.join(PRESETS)}")


def checked_unused_s(unused: float) -> float:
    """Returns the seconds since a caller's last use of an abandoned branch. Raises InvalidRequest."""
    unused_s = number(unused)
    if unused_s is None or not 0 <= unused_s <= FLOAT_MAX:
        raise InvalidRequest(f"unused={brief(unused)}: expected seconds since your last use of the branch, 0 or more")
    return float(unused_s)


def _checked_priority(priority: SupportsIndex) -> int:
    try:
        value = index(priority)
    except TypeError:
        value = -1
    if isinstance(priority, bool) or not 0 <= value <= PRIORITY_MAX:
        raise InvalidRequest(f"priority={brief(priority)}: expected a whole number from 0 to {PRIORITY_MAX}")
    return value


def _ttl_class(ttl_s: float) -> int | None:
    seconds = number(ttl_s)
    if seconds is None or not seconds > 0:
        raise InvalidRequest(f"ttl={brief(ttl_s)}: expected a positive number of seconds since the last use")
    place = bisect_left(TTL_CLASSES_S, seconds)
    return TTL_CLASSES_S[place] if place < len(TTL_CLASSES_S) else None
