"""Messages of the servers: events on standard error, one a line, for people or, as JSON, for what collects logs."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from datetime import UTC, datetime
from typing import Any

from kvstore import tracing

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

_PLACE = re.compile(r"(?:(\w+)=)?%(?:%|[-#0 +]*\d*(?:\.\d+)?([a-z]))")
_EVENT = re.compile(r"[a-z_]+\.[a-z_]+")
_OURS = frozenset(("time", "level", "logger", "event", "message", "request", "error"))


def configure(level: str, format: str = "text") -> None:
    """Sends everything of this package to standard error; of others only warnings. ``format`` is one of FORMATS."""
    line = logging.StreamHandler(sys.stderr)
    line.setFormatter(Lines() if format == "json" else _text())
    logging.basicConfig(level=logging.WARNING, handlers=[line], force=True)
    logging.getLogger("kvstore").setLevel(level.upper())


class _Text(logging.Formatter):
    """The line, and the request that it is about."""

    def format(self, record: logging.LogRecord) -> str:
        id = tracing.request_id()
        record.request = f" request={id}" if id else ""
        return super().format(record)


def _text() -> logging.Formatter:
    formatter = _Text("%(asctime)s %(levelname)s %(name)s: %(message)s%(request)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    return formatter


class Lines(logging.Formatter):
    """One JSON object a line: time, level, logger, event, message, request, and the event's values, by name.

    Events are logged as ``"session.lost worker=%s after_s=%g"``: the first word is ``event``, and each ``name=%s`` a
    field with its value, a number if it was one.
    """

    def format(self, record: logging.LogRecord) -> str:
        said = record.getMessage()
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        template = record.msg if isinstance(record.msg, str) else ""
        event = _EVENT.match(template)
        if event:
            line["event"] = event[0]
        line["message"] = said
        if (id := tracing.request_id()) is not None:
            line["request"] = id
        line.update(_fields(template, record.args))
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _fields(template: str, args: Any) -> dict[str, Any]:
    """The values of ``name=%s`` places in a message."""
    if not isinstance(args, tuple):
        return {}
    places = [place for place in _PLACE.finditer(template) if place[2]]
    if len(places) != len(args):
        return {}
    return {
        place[1]: value if isinstance(value, (int, float, bool)) else str(value)
        for place, value in zip(places, args, strict=True)
        if place[1] and place[1] not in _OURS
    }
