"""Options that several commands share."""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from kvstore.core import tracing
from kvstore.core.validate import SIZE_UNITS, scaled, size
from kvstore.core.write_mode import BOUND_BYTES_MIN

# Durations, sizes and addresses as people type them.
#
# The name of a kind, in capitals, stands for its value in ``--help``.


_DURATION_S = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_COUNTS = {"": 1, "k": 1000, "m": 1_000_000, "g": 1_000_000_000}


class Scaled(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """A number with a unit, such as ``30s`` or ``8GiB``; without one, in the unit ``""``."""

    def __init__(self, name: str, units: Mapping[str, float], example: str, least: int = 0) -> None:
        self.name = name
        self._units = units
        self._example = example
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, (int, float)):
            return value
        found = scaled(str(value), self._units)
        if found is None:
            self.fail(f"{value!r} is not a {self.name}: write {self._example}", param, ctx)
        if found < self.least:
            self.fail(f"{value!r} is less than {size(self.least)}: write for example {self._example}", param, ctx)
        return found

    def said(self, value: float) -> str:
        """Returns a value as ``convert`` takes it."""
        return f"{value}s" if "s" in self._units else str(value)


class HostPort(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """``host:port``, the port from 0 to 65535; IPv6 hosts in brackets."""

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).strip()
        host, colon, port = text.rpartition(":")
        plain = host.removeprefix("[").removesuffix("]")
        bracketed = host.startswith("[") and host.endswith("]")
        wrong = not colon or not plain or (":" in plain and not bracketed) or not (port.isascii() and port.isdigit())
        if wrong or int(port) > 65535:
            self.fail(f"{value!r} is not an address: write HOST:PORT, such as 127.0.0.1:7070 or [::1]:7070", param, ctx)
        return text


class Listen(HostPort):
    """``host:port``, or ``unix:path``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value) if str(value).startswith("unix:") else super().convert(value, param, ctx)


class BulkPort(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """A port, or ``off`` (None)."""

    name = "port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        text = str(value).strip()
        if text == "off":
            return None
        if not (text.isascii() and text.isdigit()) or int(text) > 65535:
            self.fail(f"{value!r} is not a port: write a number from 0 to 65535, or off", param, ctx)
        return int(text)


def split(address: str) -> tuple[str, int]:
    """Host (without brackets) and port of a ``host:port`` that was checked."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


DURATION = Scaled("time", _DURATION_S, "30s, 5m, 1h or 2d")
COUNT = Scaled("count", _COUNTS, "400000, 400k or 1.6M")
SIZE = Scaled("size", SIZE_UNITS, "512MiB, 8GiB or a number of bytes")
TTL = Scaled("time", {unit: each for unit, each in _DURATION_S.items() if unit}, "7d, 12h, or 0s to delete all")
"""A bare number could mean days, and seconds would delete everything."""
BOUND = Scaled("size", SIZE_UNITS, "200GiB", least=BOUND_BYTES_MIN)
"""A size of 1 MiB or more: less is one whose unit was forgotten."""
HOST_PORT, LISTEN, BULK_PORT = HostPort(), Listen(), BulkPort()


# Options declared once: a dataclass whose fields are options of a command.
#
# ``takes`` adds the options to a command, which gets them as one value. ``arguments`` turns such a value back into a
# command line, for a child that is to have the same options.


F = TypeVar("F", bound=Callable[..., Any])
Declare = Callable[[Any], Any]
FILE, FOLDER = click.Path(readable=False), click.Path(file_okay=False, readable=False)
PATHS = {"FILE": FILE, "FOLDER": FOLDER, "ROOT": FOLDER, "URL": FOLDER}
"""The type of an option or argument by its metavar, so that the shell completes names."""


def option(name: str, **attributes: Any) -> Any:
    """A field that is the option ``name``; ``attributes`` are those of ``click.option``."""
    return _field(name, click.option, attributes)


def flag(name: str, **attributes: Any) -> Any:
    """A field that is a flag, false by default."""
    return option(name, is_flag=True, default=False, **attributes)


def argument(**attributes: Any) -> Any:
    """A field that is an argument, named after the field; ``attributes`` are those of ``click.argument``."""
    return _field("", click.argument, attributes)


def group(kind: type, default: Any = None) -> Any:
    """A field that holds further options, a dataclass ``kind``.

    ``kind.of_options``, if it exists, makes the value from the options; it may return None.
    """
    return field(default=default, metadata={"group": kind})


def takes(name: str, kind: type) -> Callable[[F], F]:
    """Adds the options of the dataclass ``kind`` to a command; it gets them as the parameter ``name``."""

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def wrapped(*args: Any, **values: Any) -> Any:
            made = _made(kind, name, values)
            return command(*args, **{name: made}, **values)

        for declare in reversed(list(_declarations(kind, name))):
            wrapped = declare(wrapped)
        return wrapped  # type: ignore[return-value]

    return decorate


def arguments(value: Any) -> list[str]:
    """The command line that gives another program the options in ``value``; those that were not given are left out."""
    if value is None:
        return []
    found: list[str] = []
    for each in fields(value):
        said = getattr(value, each.name)
        if "group" in each.metadata:
            found += arguments(said)
        elif isinstance(said, bool):
            on, _, off = each.metadata["name"].partition("/")
            found += [on] if said else [off] if off else []
        elif said not in (None, ""):
            found += [each.metadata["name"], _said(said, each.metadata["type"])]
    return found


def _said(value: Any, kind: Any) -> str:
    if isinstance(kind, Scaled):
        return kind.said(value)
    return ":".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _field(name: str, kind: Callable[..., Declare], attributes: dict[str, Any]) -> Any:
    path = PATHS.get(str(attributes.get("metavar")).strip("[]"))
    if path is not None:
        attributes.setdefault("type", path)
    return field(
        default=attributes.get("default"),
        metadata={"name": name, "type": attributes.get("type"), "declare": functools.partial(kind, **attributes)},
    )


def _declarations(kind: type, prefix: str) -> Iterator[Declare]:
    for each in fields(kind):
        parameter = f"{prefix}_{each.name}"
        if "group" in each.metadata:
            yield from _declarations(each.metadata["group"], parameter)
        elif name := each.metadata["name"]:
            yield each.metadata["declare"](parameter, name)
        else:
            yield each.metadata["declare"](parameter)


def _made(kind: type, prefix: str, values: dict[str, Any]) -> Any:
    """Takes the values of ``kind``'s options out of ``values``."""
    own = {}
    for each in fields(kind):
        parameter = f"{prefix}_{each.name}"
        inner = each.metadata.get("group")
        own[each.name] = values.pop(parameter) if inner is None else _made(inner, parameter, values)
    return getattr(kind, "of_options", kind)(**own)


# Messages of the servers: events on standard error, one a line, for people or, as JSON, for what collects logs.


LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

_PLACE = re.compile(r"(?:(\w+)=)?%(?:%|[-#0 +]*\d*(?:\.\d+)?([a-z]))")
_EVENT = re.compile(r"[a-z_]+\.[a-z_]+")
_OURS = frozenset(("time", "level", "logger", "event", "message", "request", "error"))


def configure(level: str, format: str = "text") -> None:
    """Sends everything of this package to standard error; of others only warnings. ``format`` is one of FORMATS."""
    line = logging.StreamHandler(sys.stderr)
    line.setFormatter(Lines() if format == "json" else _Text())
    logging.basicConfig(level=logging.WARNING, handlers=[line], force=True)
    logging.getLogger("kvstore").setLevel(level.upper())


class _Text(logging.Formatter):
    """The line, and the request that it is about."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s%(request)s", "%Y-%m-%dT%H:%M:%SZ")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        id = tracing.request_id()
        record.request = f" request={id}" if id else ""
        return super().format(record)


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


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
worker_option = click.option(
    "--worker", metavar="HOST:PORT", help="The worker to ask, if --connect or --etcd name several."
)
LOG_FORMAT: dict[str, Any] = {
    "type": click.Choice(FORMATS),
    "default": "text",
    "show_default": True,
    "help": "text for people, json for one object per line.",
}
"""The attributes of ``--log-format``."""


@dataclass(frozen=True, slots=True)
class Logging:
    """The level and the format of a server's log."""

    level: str = option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True)
    format: str = option("--log-format", **LOG_FORMAT)

    def configure(self) -> None:
        """Configures the log of this process."""
        configure(self.level, self.format)


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """Limits on the chunks that a collector leaves on the root."""

    max_bytes: int | None = option(
        "--max-bytes", type=BOUND, help="Maximum size of all chunks, such as 200GiB; by default all available space."
    )
    ttl_s: float | None = option(
        "--ttl", type=TTL, help="Delete chunks unused for this long; 0s: all that are neither held nor pinned."
    )
