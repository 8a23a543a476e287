"""Values and texts of others in messages: shortened, on one line, sizes with a unit; and what is a number or text."""

from __future__ import annotations

from operator import index
from typing import Any, TypeGuard

CHARS_MAX = 100
FLOAT_MAX = 1.7976931348623157e308
"""The largest float but infinity: whole numbers of Python may be larger, and then fit none."""


def brief(value: object) -> str:
    """Returns the ``repr`` of a value, on one line and shortened."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - a repr of somebody else's, or of a huge int, must not hide what was wrong
        text = f"<{type(value).__name__}>"
    return text if len(text) <= CHARS_MAX else f"{text[: CHARS_MAX - 3]}..."


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


def is_whole(value: Any) -> TypeGuard[int]:
    """True for a whole number, of numpy too. True and False are numbers to Python, and a slip of a caller."""
    if type(value) is int:
        return True
    try:
        index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """True for a number, but not for True and False. Infinite ones are numbers, and so is what is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_unicode(text: str) -> bool:
    """True if a text can be encoded: those from file names may hold half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(text: str) -> str:
    """Returns text with its control characters made visible, those that begin a line too."""
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode()
