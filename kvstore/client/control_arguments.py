"""Arguments of the control service as callers give them, whatever their type, checked before anything is sent.

Separate from the messages: what is wrong here is said by its argument's name, which a message does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvstore.brief import brief
from kvstore.checks import FLOAT_MAX, is_unicode, is_whole, number
from kvstore.errors import InvalidRequest
from kvstore.namespace import Namespace

DURATION_S_MAX = 1e9
CHUNKS_MAX = (1 << 32) - 1


class HasNamespace(Protocol):
    """A Cache. The control service uses only its namespace."""

    @property
    def namespace(self) -> Namespace:
        """The namespace that the call is about."""


def checked_seconds(name: str, seconds: float) -> float:
    """Returns a number of seconds, 0 or more. Raises InvalidRequest for anything else."""
    found = number(seconds)
    if found is None or not 0 <= found <= DURATION_S_MAX:
        raise InvalidRequest(f"{name}={brief(seconds)}: expected a number of seconds, 0 to {DURATION_S_MAX:g}")
    return float(found)


def namespace_of(cache: HasNamespace) -> Namespace:
    """Returns the namespace of a cache. Raises InvalidRequest for anything else."""
    namespace = getattr(cache, "namespace", None)
    if not isinstance(namespace, Namespace):
        raise InvalidRequest(f"cache={brief(cache)}: expected a cache, such as store.namespace(...) returns")
    return namespace


def checked_chunks_max(chunks_max: int) -> int:
    """Returns the limit on the chunks of an answer, as a message has room for it. Raises InvalidRequest."""
    if not is_whole(chunks_max) or chunks_max < 0:
        raise InvalidRequest(f"chunks_max={brief(chunks_max)}: expected a whole number of chunks, or 0 for all")
    return min(int(chunks_max), CHUNKS_MAX)


def checked_changes(changes: Mapping[str, object]) -> dict[str, str]:
    """Returns new values of limits as text, by name. Raises InvalidRequest for what is no text and no number."""
    if not isinstance(changes, Mapping):
        raise InvalidRequest(
            f'changes={brief(changes)}: expected a mapping of limits, such as {{"calls_max": 100}}; limits() lists them'
        )
    return {_checked_name(name): _value_text(name, value) for name, value in changes.items()}


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not is_unicode(name):
        raise InvalidRequest(f"changes of {brief(name)}: expected the name of a limit; limits() lists them")
    return name


def _value_text(name: str, value: object) -> str:
    if isinstance(value, str) and is_unicode(value):
        return value
    found = number(value)
    if found is None or (isinstance(found, int) and abs(found) > FLOAT_MAX):
        raise InvalidRequest(f"changes[{brief(name)}]={brief(value)}: expected a number, or text")
    return str(found)
