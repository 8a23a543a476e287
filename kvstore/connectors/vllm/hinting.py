"""What a request says of how long its KV is worth keeping.

vLLM passes on two things that it does not look into: ``kv_transfer_params`` of a request, and ``kv_hints`` of an
orchestrator (``vllm/v1/kv_hints``). What it schedules by, a request's ``priority``, counts where these do not say more.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.client.cache import check_pin
from kvstore.errors import InvalidRequest
from kvstore.hints import DEFAULT, PRIORITY_DEFAULT, Hints

log = logging.getLogger(__name__)

NAME = "kvstore"
"""The entry of ``kv_transfer_params``, and the ``action_type`` of a hint."""
KNOWN = frozenset({"priority", "ttl", "preset", "session", "supersede", "pin", "pin_ttl", "unpin"})
URGENCY_MAX = 25
"""The most that vLLM's own priority raises or lowers ours."""
SESSION_CHARS_MAX = 256
PIN_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")
PIN_TTL_S = 3600.0


@dataclass(frozen=True, slots=True)
class Said:
    """The words of one request."""

    hints: Hints = DEFAULT
    session: str = ""
    """Its session; empty if it has none."""
    supersede: bool | None = None
    """True: its session has left all its other branches. False: they stay, and this one too."""
    pin: str = ""
    """The name under which its prompt is pinned; empty: it is not."""
    pin_ttl_s: float = PIN_TTL_S
    unpin: str = ""
    """The name whose pins end with this request; empty: none."""


NOTHING = Said()


def said_of(request: Any) -> Said:
    """Returns the words of a request; what it does not say, or says in a way that makes no sense, is left out."""
    session = getattr(request, "session_id", None)
    session = session if isinstance(session, str) and len(session) <= SESSION_CHARS_MAX else ""
    said, own = _said(request), Hints(_priority_of(request))
    if said is None:
        return Said(own, session)
    try:
        if not isinstance(said, Mapping) or not KNOWN.issuperset(said):
            raise InvalidRequest(f"{said!r:.200}: expected some of {', '.join(sorted(KNOWN))}")
        priority = said.get("priority")
        if priority is None and said.get("preset") is None:
            priority = own.priority
        return Said(
            Hints.of(priority, said.get("ttl"), said.get("preset")),
            _checked_session(said.get("session", session)),
            _checked_supersede(said.get("supersede")),
            _checked_name("pin", said),
            _checked_pin_ttl(said.get("pin_ttl", PIN_TTL_S)),
            _checked_name("unpin", said),
        )
    except InvalidRequest as error:
        log.warning("kvstore: the hints of request %s are ignored: %s", request.request_id, error)
        return Said(own, session)


def _priority_of(request: Any) -> int:
    """Returns our priority for vLLM's own, whose default is 0; a lower one is more urgent."""
    urgency = getattr(request, "priority", 0)
    if not isinstance(urgency, int):
        return PRIORITY_DEFAULT
    return PRIORITY_DEFAULT - max(-URGENCY_MAX, min(URGENCY_MAX, urgency))


def _checked_session(session: Any) -> str:
    if not isinstance(session, str) or len(session) > SESSION_CHARS_MAX:
        raise InvalidRequest(f"session={session!r:.300}: expected text of at most {SESSION_CHARS_MAX} characters")
    return session


def _checked_supersede(supersede: Any) -> bool | None:
    if supersede is not None and not isinstance(supersede, bool):
        raise InvalidRequest(f"supersede={supersede!r:.100}: expected true or false")
    return supersede


def _checked_name(word: str, said: Mapping[str, Any]) -> str:
    name = said.get(word)
    if name is not None and not (isinstance(name, str) and PIN_NAME.fullmatch(name)):
        raise InvalidRequest(f"{word}={name!r:.100}: expected 1 to 64 letters, digits and . _ : -")
    return name or ""


def _checked_pin_ttl(ttl: Any) -> float:
    if isinstance(ttl, bool):
        raise InvalidRequest(f"pin_ttl={ttl!r}: expected seconds")
    check_pin(ttl, "")
    return float(ttl)


def _said(request: Any) -> Any:
    params = getattr(request, "kv_transfer_params", None)
    if isinstance(params, Mapping) and NAME in params:
        return params[NAME]
    actions = getattr(getattr(request, "kv_hints", None), "actions", ())
    return next((each.payload for each in actions if each.action_type == NAME), None)
