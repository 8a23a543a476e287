"""Text: values in messages, and JSON of others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

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


def shown(text: str) -> str:
    """Returns text with its control characters made visible, those that begin a line too."""
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode()


# JSON that others wrote: on a shared root, in etcd, in a file of a user, in a request.
#
# ``json.loads`` goes one level down the stack for each bracket. Near the stack's end the garbage collector may run,
# and finalizers of the whole process fail there, an engine's too. So nothing is parsed that is nested too deep.


Hook = Callable[[list[tuple[str, Any]]], Any]

DEPTH_MAX = 100

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
"""Takes linear time on any text: a string without an end goes to the text's end."""
_BRACKET = re.compile(r"[\[\]{}]")


def parse_json(content: bytes | str, object_pairs_hook: Hook | None = None, depth_max: int = DEPTH_MAX) -> Any:
    """Returns what ``json.loads`` does. Raises ValueError for what is no JSON in UTF-8, or is nested too deep."""
    text = content if isinstance(content, str) else content.decode().removeprefix("\ufeff")
    check_depth(text, depth_max)
    return json.loads(text, object_pairs_hook=object_pairs_hook)


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
