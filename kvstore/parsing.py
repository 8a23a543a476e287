"""JSON that others wrote: on a shared root, in etcd, in a file of a user, in a request.

``json.loads`` goes one level down the stack for each bracket. Near the stack's end the garbage collector may run, and
finalizers of the whole process fail there, an engine's too. So nothing is parsed that is nested too deep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

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
