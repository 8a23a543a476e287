"""What a request says of how long its KV is worth keeping.

vLLM passes on two things that it does not look into: ``kv_transfer_params`` of a request, and ``kv_hints`` of an
orchestrator (``vllm/v1/kv_hints``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.hints import DEFAULT, Hints

log = logging.getLogger(__name__)

NAME = "kvstore"
"""The entry of ``kv_transfer_params``, and the ``action_type`` of a hint."""
KNOWN = frozenset({"priority", "ttl", "preset"})


def hints_of(request: Any) -> Hints:
    """Returns the hints of a request; the default ones if it has none, or none that can be used."""
    said = _said(request)
    if said is None:
        return DEFAULT
    try:
        if not isinstance(said, Mapping) or not KNOWN.issuperset(said):
            raise InvalidRequest(f"{said!r:.200}: expected some of {', '.join(sorted(KNOWN))}")
        return Hints.of(said.get("priority"), said.get("ttl"), said.get("preset"))
    except InvalidRequest as error:
        log.warning("kvstore: the hints of request %s are ignored: %s", request.request_id, error)
        return DEFAULT


def _said(request: Any) -> Any:
    params = getattr(request, "kv_transfer_params", None)
    if isinstance(params, Mapping) and NAME in params:
        return params[NAME]
    actions = getattr(getattr(request, "kv_hints", None), "actions", ())
    return next((each.payload for each in actions if each.action_type == NAME), None)
