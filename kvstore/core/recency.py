"""Hints of a writer, and recency: the code in a chunk's mtime, without etcd and without atime.

Hints steer what garbage collection takes first. They protect nothing (pins do), and may be lost.

A stamp is the start of the current *quantum* (30 s by default; puts take the current *tick* of 0.25 s) plus
nearly one tick, minus four microseconds per chunk of
depth in its chain, plus a code of less than four microseconds for uses and hints.  From that follow the properties that
garbage collection relies on:

* Readers renew a chunk at most once per quantum (rate limit, without remembering who did).
* A reader that renews a chunk renews its ancestors first, to the same quantum, so a chunk is never staler than its
  child.
* Among chunks of one quantum a child is strictly staler than its parent, so that LRU order takes leaves first.
* A put gives all its chunks one tick, and its ancestors at least that. So of prompts that were put within seconds the
  oldest go whole, not the tails of all.
* Uses and hints of a chunk are known without opening its file.
* The code grows with each of uses, priority and ttl, so that raising one never lowers an mtime.

A file system that keeps mtime in whole seconds loses all but the first two: hints read as the default there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from types import MappingProxyType
from typing import Literal, SupportsIndex, cast

import numpy as np
import numpy.typing as npt

from kvstore.core.validate import brief, number
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


NS_PER_S = 1_000_000_000
QUANTUM_S = 30
"""The quantum by default. With 60 s a store that is rewritten within minutes found up to 2 % less, because uses within
a quantum count once; a shorter one costs more renewals than it finds.
"""
TICK_NS = 250_000_000
TICK_S = TICK_NS / NS_PER_S
TOP_NS = TICK_NS - 2_000
"""The stamp of a prompt's first chunk in its tick. No code brings it into the next one."""
DEPTH_STEP_NS = 4_000
DEPTH_MAX = 62_497
"""The greatest depth that fits into one tick, so that no two overlap. Deeper chunks get its stamp."""
AHEAD_MAX_S = 86_400.0
"""No clock is further ahead than this."""
USES_MAX = 3
"""Uses are counted as never, once, twice, and more often."""

_TTLS = (*TTL_CLASSES_S, None)
"""All ttls, from the shortest to none."""
_COARSE_NS = 20
"""No code but the default's, 0, is a multiple of this. So where a file system rounds times (to 100 ns, to 1 us, to
seconds), or a tool does that copies files, hints read as the default and not as others."""


@dataclass(frozen=True, slots=True)
class Recency:
    """A chunk's last use, depth, uses and hints, decoded from its mtime."""

    last_use_s: float
    """Start of the quantum or tick of its last use, in seconds since the epoch."""
    depth: int
    """Its index in its chain, at most ``DEPTH_MAX``; 0 if the mtime is not a stamp."""
    uses: int
    """The number of quanta after its publication in which it was used; ``USES_MAX`` means that many or more."""
    priority: int
    ttl_s: int | None

    @property
    def hints(self) -> Hints:
        """The hints of its writers."""
        return Hints(self.priority, self.ttl_s)

    def covers(self, hints: Hints) -> bool:
        """True if a put with ``hints`` that finds the chunk raises nothing."""
        return self.hints.covers(hints)


def quantum_of(now_s: float, quantum_s: int) -> int:
    """Start of the quantum that ``now_s`` lies in, in whole seconds since the epoch."""
    return int(now_s) // quantum_s * quantum_s


def ns_of(start_s: float) -> int:
    """The start of a quantum or tick in nanoseconds."""
    return int(start_s / TICK_S) * TICK_NS


def stamp_ns(start_s: float, depth: int, hints: Hints = DEFAULT, uses: int = 0) -> int:
    """The mtime of a chunk at ``depth`` in its chain (0 is the first), used in that quantum or tick; nanoseconds."""
    code = _spread(_number(hints, uses) - _DEFAULT_NUMBER)
    return ns_of(start_s) + TOP_NS - min(depth, DEPTH_MAX) * DEPTH_STEP_NS + code


def stamps_ns(start_s: float, depths: npt.NDArray[np.int64], hints: Hints = DEFAULT) -> npt.NDArray[np.int64]:
    """``stamp_ns`` of chunks at many depths."""
    return stamp_ns(start_s, 0, hints) - np.minimum(depths, DEPTH_MAX) * DEPTH_STEP_NS


def is_fresh(mtime_ns: int, start_s: float) -> bool:
    """True if a stamp belongs to that quantum or tick, or to a later one (a host whose clock is ahead)."""
    return mtime_ns >= ns_of(start_s)


def decode(mtime_ns: int, quantum_s: int) -> Recency:
    """Decodes any mtime; one that is not a stamp counts as the last use of a chunk with default hints."""
    tick = mtime_ns // TICK_NS
    below = tick * TICK_NS + TOP_NS - mtime_ns
    depth = (below + _CODE_MAX) // DEPTH_STEP_NS
    number = _gathered(depth * DEPTH_STEP_NS - below) + _DEFAULT_NUMBER
    if 0 <= depth <= DEPTH_MAX and 0 <= number < _NUMBERS:
        rest, ttl = divmod(number, len(_TTLS))
        priority, uses = divmod(rest, USES_MAX + 1)
        return Recency(tick * TICK_S, depth, uses, priority, _TTLS[ttl])
    return Recency(mtime_ns // NS_PER_S // quantum_s * quantum_s, 0, 0, DEFAULT.priority, DEFAULT.ttl_s)


def cover(mtimes_ns: npt.NDArray[np.int64], quantum_s: int, hints: Hints) -> npt.NDArray[np.bool_]:
    """For each mtime, whether a put with ``hints`` leaves it as it is (``Recency.covers``)."""
    below = mtimes_ns // TICK_NS * TICK_NS + TOP_NS - mtimes_ns
    depths = (below + _CODE_MAX) // DEPTH_STEP_NS
    # Stamps with one code have the same hints; an mtime that is not a stamp has the default ones.
    codes = np.where((depths >= 0) & (depths <= DEPTH_MAX), depths * DEPTH_STEP_NS - below, 0).tolist()
    one_of_each = dict(zip(codes, mtimes_ns.tolist(), strict=True))
    covered = {code: decode(mtime_ns, quantum_s).covers(hints) for code, mtime_ns in one_of_each.items()}
    return np.array([covered[code] for code in codes], np.bool_)


def renewed_ns(
    mtime_ns: int, start_s: float, quantum_s: int, depth: int, least: Hints = LEAST, uses_least: int = 0
) -> int | None:
    """The mtime that a chunk gets when it is used in that quantum or tick, or None if it stays.

    Counts one more use if this is the first in this quantum, and raises hints to ``least``; never an earlier time.
    """
    was = decode(mtime_ns, quantum_s)
    hints = was.hints.raised_to(least)
    if not is_fresh(mtime_ns, quantum_of(start_s, quantum_s)):
        return stamp_ns(start_s, depth, hints, max(min(was.uses + 1, USES_MAX), uses_least))
    uses = max(was.uses, uses_least)
    if not is_fresh(mtime_ns, start_s):
        return stamp_ns(start_s, depth, hints, uses)
    if (hints, uses) == (was.hints, was.uses):
        return None
    stamp = stamp_ns(was.last_use_s, depth, hints, uses)
    return stamp if stamp > mtime_ns else None


def _number(hints: Hints, uses: int) -> int:
    """Priority, uses and ttl as one number from 0 on, which grows with each of them."""
    return (hints.priority * (USES_MAX + 1) + uses) * len(_TTLS) + _TTLS.index(hints.ttl_s)


def _spread(offset: int) -> int:
    """The code of a number's distance from the default's: the distance, leaving out the multiples of _COARSE_NS."""
    beyond = (abs(offset) - 1) // (_COARSE_NS - 1) if offset else 0
    return offset + beyond if offset > 0 else offset - beyond


def _gathered(code: int) -> int:
    """The inverse of ``_spread``; 0, the default, for a code that has been rounded."""
    if code % _COARSE_NS == 0:
        return 0
    beyond = abs(code) // _COARSE_NS
    return code - beyond if code > 0 else code + beyond


_NUMBERS = (PRIORITY_MAX + 1) * (USES_MAX + 1) * len(_TTLS)
_DEFAULT_NUMBER = _number(DEFAULT, 0)
_CODE_MIN = _spread(-_DEFAULT_NUMBER)
_CODE_MAX = _spread(_NUMBERS - 1 - _DEFAULT_NUMBER)
assert _CODE_MAX - _CODE_MIN < DEPTH_STEP_NS, "a chunk would be as fresh as its parent"
assert DEPTH_MAX * DEPTH_STEP_NS - _CODE_MIN <= TOP_NS < TICK_NS - _CODE_MAX, "a stamp would lie before its quantum"


def was_never_stamped(mtime_ns: int, now_s: float) -> bool:
    """True for the time of a file whose writer was killed between creating it on NFS and stamping it.

    Until then an exclusive create has a number of the protocol there (RFC 8881, 18.16.3), often one of years to come.
    """
    return mtime_ns / NS_PER_S > now_s + AHEAD_MAX_S
