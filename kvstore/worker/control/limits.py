"""The limits that can change while a worker runs: their names, their values, and changing several at once or none.

Separate from their use: each place reads its limit when it needs it, and allocates nothing by it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.node import limits as node_limits
from kvstore.node.limits import Limits
from kvstore.node.member import Member
from kvstore.results import LimitValue
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.service import Service

log = logging.getLogger(__name__)

LOG_LEVEL = "log_level"
LOG_LEVELS = ("debug", "info", "warning", "error")
_LOGGER = logging.getLogger("kvstore")

OF_WORKER = {
    "calls_max": "calls at once; more are refused",
    "bytes_in_flight_max": "bytes of payload between network and root; a call that needs more is refused",
    "holds_max": "holds of clients alive at once",
    "hold_tokens_max": "tokens of all held prompts together",
}
OF_NODE = {
    "match_deadline_s": "seconds; a match that takes longer is a miss",
    "read_deadline_s": "seconds; a read that takes longer is a miss",
    "write_deadline_s": "seconds; a put that takes longer is refused",
    "behind_share": "share of memory that may wait to be written to the root",
    "operations_max": "operations (prefetch, clear) that are unfinished",
    "pins_per_owner_max": "pins of one owner",
    "pins_max": "pins of the whole store",
}
assert tuple(OF_NODE) == node_limits.CHANGEABLE
MEANINGS: Mapping[str, str] = {**OF_WORKER, **OF_NODE, LOG_LEVEL: "how much the worker logs: " + ", ".join(LOG_LEVELS)}
"""Every limit that can change, with a description of what it bounds."""


class LiveLimits:
    """The changeable limits of one worker. Thread-safe."""

    def __init__(self, member: Member, service: Service) -> None:
        self._member = member
        self._service = service
        self._lock = threading.Lock()
        self._started = self._now()

    def every(self) -> list[LimitValue]:
        """Returns all limits with their current values."""
        with self._lock:
            return self._told({})

    def change(self, wanted: Mapping[str, str]) -> list[LimitValue]:
        """Changes several limits, all or none. Raises InvalidRequest, which says what is wrong with which."""
        with self._lock:
            before = self._now()
            unknown = sorted(set(wanted) - set(MEANINGS))
            if unknown:
                raise InvalidRequest(
                    f"limit {', '.join(unknown)}: not one that can change while the worker runs; expected one of "
                    + ", ".join(MEANINGS)
                )
            # Check everything before any change; the changes themselves cannot fail.
            worker, node = self._checked_worker(wanted), self._checked_node(wanted)
            level = self._checked_level(wanted.get(LOG_LEVEL))
            self._service.adjust(worker)
            self._member.adjust(node)
            if level is not None:
                _LOGGER.setLevel(level)
            now = self._now()
            changed = {name: before[name] for name in MEANINGS if before[name] != now[name]}
            for name, was in changed.items():
                log.warning("worker.limit_changed name=%s before=%s now=%s", name, was, now[name])
            return self._told(changed)

    def _checked_worker(self, wanted: Mapping[str, str]) -> WorkerLimits:
        limits = self._service.limits
        new = replace(limits, **_parsed(WorkerLimits, OF_WORKER, wanted))
        most = int(self._started["calls_max"]) * WorkerLimits.RAISE_MAX
        if new.calls_max > most:
            raise InvalidRequest(
                f"calls_max={new.calls_max}: this worker has threads for at most {most}, "
                f"{WorkerLimits.RAISE_MAX} times what it was started with"
            )
        return new

    def _checked_node(self, wanted: Mapping[str, str]) -> Limits:
        return replace(self._member.node.limits, **_parsed(Limits, OF_NODE, wanted))

    def _checked_level(self, level: str | None) -> str | None:
        if level is not None and level not in LOG_LEVELS:
            raise InvalidRequest(f"log_level={level!r}: expected one of {', '.join(LOG_LEVELS)}")
        return level.upper() if level is not None else None

    def _now(self) -> dict[str, str]:
        worker, node = self._service.limits, self._member.node.limits
        return {
            **{name: _text(getattr(worker, name)) for name in OF_WORKER},
            **{name: _text(getattr(node, name)) for name in OF_NODE},
            LOG_LEVEL: logging.getLevelName(_LOGGER.getEffectiveLevel()).lower(),
        }

    def _told(self, changed: Mapping[str, str]) -> list[LimitValue]:
        now = self._now()
        return [
            LimitValue(name, now[name], meaning, self._started[name], changed.get(name, ""))
            for name, meaning in MEANINGS.items()
        ]


def _parsed(kind: type[object], names: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, Any]:
    """Returns the wanted values of these names as numbers, whole ones if the limit is whole."""
    whole = {each.name for each in fields(kind) if each.type == "int"}  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    for name in names:
        if name in wanted:
            text = wanted[name].strip()
            try:
                found[name] = int(text) if name in whole else float(text)
            except ValueError:
                expected = "a whole number" if name in whole else "a number"
                raise InvalidRequest(f"limit {name}={text!r}: expected {expected}") from None
    return found


def _text(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
