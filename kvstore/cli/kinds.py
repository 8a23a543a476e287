"""Durations, sizes and addresses as people type them.

The name of a kind, in capitals, stands for its value in ``--help``.
"""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

import click

from kvstore.brief import size
from kvstore.writes import BOUND_BYTES_MIN

_DURATION_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_SIZE_BYTES = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _SIZE_BYTES[f"{_letter}ib"] = 1 << (10 * _power)
    _SIZE_BYTES[f"{_letter}b"] = 1000**_power
_COUNTS = {"": 1, "k": 1000, "m": 1_000_000, "g": 1_000_000_000}
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """Seconds from ``30s``, ``5m``, ``1h``, ``2d``, ``500ms``, or a bare number of seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        found = _NUMBER.fullmatch(str(value).strip())
        scale = _DURATION_S.get(found[2].lower() or "s") if found else None
        if found is None or scale is None:
            self.fail(f"{value!r} is not a duration: write 30s, 5m, 1h or 2d", param, ctx)
        return float(found[1]) * scale


class Moment(Duration):
    """Seconds since the epoch from ``2026-11-21T10:00`` (of this host's time zone, unless it says one), or a duration
    such as ``2h`` or ``2h ago``: so long before now."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        text = str(value).strip()
        try:
            return datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError, OSError):
            pass
        ago = text.removesuffix("ago").strip()
        if not _NUMBER.fullmatch(ago):
            self.fail(f"{value!r} is not a time: write 2026-11-21T10:00, or 2h for two hours ago", param, ctx)
        return time.time() - super().convert(ago, param, ctx)


class Count(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """A number of tokens from ``400k``, ``1.6M``, or a bare number."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = _NUMBER.fullmatch(str(value).strip().replace(",", "").replace("_", ""))
        scale = _COUNTS.get(found[2].lower()) if found else None
        if found is None or scale is None:
            self.fail(f"{value!r} is not a number: write 400000, 400k or 1.6M", param, ctx)
        return int(float(found[1]) * scale)


class Size(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """Bytes from ``8GiB``, ``512MiB``, ``2GB``, or a bare number of bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = _NUMBER.fullmatch(str(value).strip())
        scale = _SIZE_BYTES.get(found[2].lower()) if found else None
        if found is None or scale is None:
            self.fail(f"{value!r} is not a size: write 512MiB, 8GiB or a number of bytes", param, ctx)
        return int(float(found[1]) * scale)


class Bound(Size):
    """A size of 1 MiB or more: less is one whose unit was forgotten."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        size_bytes = super().convert(value, param, ctx)
        if size_bytes < BOUND_BYTES_MIN:
            self.fail(f"{value!r} is {size(size_bytes)}, under 1MiB: give a unit, such as 200GiB", param, ctx)
        return size_bytes


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


DURATION, MOMENT, COUNT, SIZE, HOST_PORT, LISTEN = Duration(), Moment(), Count(), Size(), HostPort(), Listen()
BOUND, BULK_PORT = Bound(), BulkPort()
