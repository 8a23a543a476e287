"""Values and texts of others in messages: shortened, on one line, sizes with a unit."""

from __future__ import annotations

CHARS_MAX = 100


def brief(value: object) -> str:
    """Returns the ``repr`` of a value, on one line and shortened."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - a repr of somebody else's, or of a huge int, must not hide what was wrong
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


def shown(text: str) -> str:
    """Returns text with its control characters made visible, those that begin a line too."""
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode()
