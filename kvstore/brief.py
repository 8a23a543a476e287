"""Values of callers: in messages at most a hundred characters of each, sizes with their unit, and what can be sent."""

from __future__ import annotations

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


def size(count_bytes: float) -> str:
    """Bytes for people: 1.5 GiB."""
    value, unit = float(count_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"


def is_unicode(text: str) -> bool:
    """True if a text can be encoded: those from file names may hold half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
