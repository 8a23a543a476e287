"""What a request says of how long its KV is worth keeping.

vLLM passes on two things that it does not look into: ``kv_transfer_params`` of a request, and ``kv_hints`` of an
orchestrator (``vllm/v1/kv_hints``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.hints import DEFAULT, Hints

log = logging.getLogger(__name__)

NAME = "kvstore"
"""The entry of ``kv_transfer_params``, and the ``action_type`` of a hint."""
KNOWN = frozenset({"priority", "ttl", "preset", "session", "supersede"})
SESSION_CHARS_MAX = 256


@dataclass(frozen=True, slots=True)
class Said:
    """The words of one request."""

    hints: Hints = DEFAULT
    session: str = ""
    """Its session; empty if it has none."""
    supersede: bool | None = None
    """True: its session has left all its other branches. False: they stay, and this one too."""


NOTHING = Said()


def said_of(request: Any) -> Said:
    """Returns the words of a request; what it does not say, or says in a way that makes no sense, is left out."""
    session = getattr(request, "session_id", None)
    session = session if isinstance(session, str) and len(session) <= SESSION_CHARS_MAX else ""
    said = _said(request)
    if said is None:
        return Said(session=session)
    try:
        if not isinstance(said, Mapping) or not KNOWN.issuperset(said):
            raise InvalidRequest(f"{said!r:.200}: expected some of {', '.join(sorted(KNOWN))}")
        return Said(
            Hints.of(said.get("priority"), said.get("ttl"), said.get("preset")),
            _checked_session(said.get("session", session)),
            _checked_supersede(said.get("supersede")),
        )
    except InvalidRequest as error:
        log.warning("kvstore: the hints of request %s are ignored: %s", request.request_id, error)
        return Said(session=session)


def _checked_session(session: Any) -> str:
    if not isinstance(session, str) or len(session) > SESSION_CHARS_MAX:
        raise InvalidRequest(f"session={session!r:.300}: expected text of at most {SESSION_CHARS_MAX} characters")
    return session


def _checked_supersede(supersede: Any) -> bool | None:
    if supersede is not None and not isinstance(supersede, bool):
        raise InvalidRequest(f"supersede={supersede!r:.100}: expected true or false")
    return supersede


def _said(request: Any) -> Any:
    params = getattr(request, "kv_transfer_params", None)
    if isinstance(params, Mapping) and NAME in params:
        return params[NAME]
    actions = getattr(getattr(request, "kv_hints", None), "actions", ())
    return next((each.payload for each in actions if each.action_type == NAME), None)
