"""Checks of what callers give, and values in error messages."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from numbers import Real
from operator import index
from typing import Any, Literal, TypeGuard

import numpy as np

from kvstore.errors import InvalidRequest

# Values and texts of others in messages: shortened, on one line, sizes with a unit.


CHARS_MAX = 100


def brief(value: object) -> str:
    """Returns the ``repr`` of a value, on one line and shortened."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - a foreign repr, or that of a huge int, must not hide what was wrong
        text = f"<{type(value).__name__}>"
    return text if len(text) <= CHARS_MAX else f"{text[: CHARS_MAX - 3]}..."


def kind_of(value: object) -> str:
    """Returns what a value is, with its article: an int, a list, None."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def why(cause: Exception) -> str:
    """Returns what went wrong, without the number and the path that an OSError adds to it."""
    return (isinstance(cause, OSError) and cause.strerror) or str(cause)


def size(count_bytes: float) -> str:
    """Bytes for people: 1.5 GiB."""
    value, unit = float(count_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"


SIZE_UNITS = {"": 1, "b": 1}
"""Bytes by unit, in small letters."""
for _power, _letter in enumerate("kmgtp", start=1):
    SIZE_UNITS |= {f"{_letter}ib": 1 << (10 * _power), f"{_letter}b": 1000**_power}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def scaled(text: str, units: Mapping[str, float]) -> float | None:
    """Returns a number with a unit, such as ``1.5GiB``, as an int where the unit is one; None if it is none."""
    found = _NUMBER.fullmatch(text)
    unit = units.get(found[2].lower()) if found else None
    if found is None or unit is None:
        return None
    value = float(found[1]) * unit
    return value if isinstance(unit, float) else int(value)


def parse_size(given: object) -> object:
    """Returns a text such as ``256MiB`` in bytes, anything else as it is."""
    value = scaled(given, SIZE_UNITS) if isinstance(given, str) else None
    return given if value is None else value


def shown(text: str) -> str:
    """Returns text with its control characters made visible, those that begin a line too."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


# JSON that others wrote: on a shared root, in etcd, in a file of a user, in a request.
#
# ``json.loads`` goes one level down the stack for each bracket. Near the stack's end the garbage collector may run,
# and finalizers of the whole process fail there, an engine's too. So nothing is parsed that is nested too deep.


DEPTH_MAX = 100

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
"""Takes linear time on any text: a string without an end goes to the text's end."""
_BRACKET = re.compile(r"[\[\]{}]")


def parse_json(content: bytes | str, *, once: bool = False, depth_max: int = DEPTH_MAX) -> Any:
    """Returns what ``json.loads`` does. Raises ValueError for what is no JSON in UTF-8, or is nested too deep.

    With ``once`` it raises InvalidRequest for a name that an object has twice: JSON keeps the last silently.
    """
    text = content if isinstance(content, str) else content.decode().removeprefix("\ufeff")
    check_depth(text, depth_max)
    return json.loads(text, object_pairs_hook=_once if once else None)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise InvalidRequest(f"{', '.join(map(repr, twice))} occurs twice in one object: expected each name once")
    return found


def check_depth(text: str, depth_max: int = DEPTH_MAX) -> None:
    """Raises ValueError for JSON that is nested too deep; for other parsers."""
    if text.count("[") + text.count("{") > depth_max and _depth(text) > depth_max:
        raise ValueError(f"nested deeper than {depth_max} levels")


def _depth(text: str) -> int:
    """The deepest level of brackets outside of strings."""
    depth = deepest = 0
    for bracket in _BRACKET.findall(_STRING.sub("", text)):
        if bracket in "[{":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return deepest


FLOAT_MAX = 1.7976931348623157e308
"""The largest float but infinity: whole numbers of Python may be larger, and then fit none."""
WAIT_S_MAX = 1e9
"""Locks refuse to wait for centuries."""
SECONDS_MAX = 10**6
"""The longest time that a limit can be, 11 days: the system takes no more milliseconds than fit 32 bits."""
COUNT_MAX = 1 << 31
BYTES_MAX = 1 << 48


def is_whole(value: Any) -> TypeGuard[int]:
    """True for a whole number, of numpy too. True and False are numbers to Python, and a slip of a caller."""
    if type(value) is int:
        return True
    try:
        index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def checked_flag(name: str, value: bool) -> bool:
    """Returns a flag. Raises InvalidRequest for what is only like one."""
    if not isinstance(value, bool | np.bool_):
        raise InvalidRequest(f"{name}={brief(value)}: expected True or False")
    return bool(value)


def check_text(name: str, text: object, bytes_max: int) -> None:
    """Raises InvalidRequest for what is no text, or a longer one, or cannot be encoded."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} is {kind_of(text)}: expected text")
    try:
        size_bytes = len(text.encode())
    except UnicodeEncodeError as cause:
        raise InvalidRequest(f"{name} is not valid Unicode: {cause}") from cause
    if size_bytes > bytes_max:
        raise InvalidRequest(f"{name} has {size_bytes} bytes, over the limit of {bytes_max}")


def is_unicode(text: str) -> bool:
    """True if a text can be encoded: those from file names may hold half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def number(value: object) -> float | None:
    """Returns a real number, of numpy too, as one of Python's; None for anything else, and for True and False.

    Compare the result, not the value: numpy rounds the other side to its own type first. Infinity is a number, and so
    is NaN.
    """
    if type(value) is float:
        return value
    if is_whole(value):
        return index(value)
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # a fraction of large numbers
        return None


def checked_timeout(timeout: float | None) -> float | None:
    """Returns how long to wait, in seconds that locks take; None: without end. Raises InvalidRequest."""
    if timeout is None:
        return None
    seconds = number(timeout)
    if seconds is None or not seconds >= 0:
        raise InvalidRequest(f"timeout={brief(timeout)}: expected 0 or more seconds")
    return float(min(seconds, WAIT_S_MAX))


def checked_worker(worker: str | None) -> str | None:
    """Returns the address of a worker, or None. Raises InvalidRequest for anything else."""
    if worker is not None and not isinstance(worker, str):
        raise InvalidRequest(f"worker={brief(worker)}: expected an address that stats_each() lists, or None")
    return worker


def checked_hold_ttl(ttl: float) -> float:
    """Returns how long a hold lasts at most, in seconds. Raises InvalidRequest."""
    seconds = number(ttl)
    if seconds is None or not seconds > 0 or FLOAT_MAX < seconds < math.inf:
        raise InvalidRequest(f"ttl={brief(ttl)}: expected a positive number of seconds")
    return float(seconds)


def check_limits(limits: Any) -> None:
    """Checks each field of a frozen dataclass of limits, and makes its value one of Python: sums in numpy's overflow.

    All are more than 0. ``int`` fields are whole, and at most COUNT_MAX; ``float`` fields are times or shares, at most
    SECONDS_MAX; those with ``bytes`` in their name are at most BYTES_MAX. Raises InvalidRequest.
    """
    for each in fields(limits):
        given, is_count = getattr(limits, each.name), each.type == "int"
        most = BYTES_MAX if "bytes" in each.name else COUNT_MAX if is_count else SECONDS_MAX
        value = number(given)
        if value is None or not 0 < value <= most or (is_count and value != int(value)):
            raise InvalidRequest(
                f"limit {each.name}={brief(given)}: expected a {'whole ' * is_count}number, more than 0 and at most "
                f"{most:,}"
            )
        object.__setattr__(limits, each.name, int(value) if is_count else value)


TierName = Literal["memory", "disk"]
"""The tiers to prefetch to."""


def checked_tier(tier: object) -> TierName:
    """Returns a tier to prefetch to. Raises InvalidRequest."""
    if isinstance(tier, str) and tier in ("memory", "disk"):
        return "disk" if tier == "disk" else "memory"
    raise InvalidRequest(f"tier={brief(tier)}: expected memory or disk")
