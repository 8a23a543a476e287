"""Options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from kvstore.cli import logs
from kvstore.cli.declared import option
from kvstore.cli.kinds import BOUND, DURATION
from kvstore.writes import Durability

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
worker_option = click.option(
    "--worker", metavar="HOST:PORT", help="The worker to ask, if --connect or --etcd name several."
)
DURABILITY: dict[str, Any] = {
    "type": click.Choice([each.value for each in Durability]),
    "default": "none",
    "show_default": True,
    "help": "What a crash of the host may lose (a miss): none: the last half minute; everysec: about the last second; "
    "fsync: nothing, each put is on the device before it returns.",
}
"""The attributes of ``--durability``."""
LOG_FORMAT: dict[str, Any] = {
    "type": click.Choice(logs.FORMATS),
    "default": "text",
    "show_default": True,
    "help": "text for people, json for one object a line.",
}
"""The attributes of ``--log-format``."""


@dataclass(frozen=True, slots=True)
class Logging:
    """The level and the format of a server's log."""

    level: str = option("--log-level", type=click.Choice(logs.LEVELS), default="info", show_default=True)
    format: str = option("--log-format", **LOG_FORMAT)

    def configure(self) -> None:
        """Configures the log of this process."""
        logs.configure(self.level, self.format)


@dataclass(frozen=True, slots=True)
class Room:
    """Limits on the chunks that a collector leaves on the root."""

    max_bytes: int | None = option(
        "--max-bytes", type=BOUND, help="Maximum size of all chunks, such as 200GiB; by default all the room there is."
    )
    ttl_s: float | None = option(
        "--ttl", type=DURATION, help="Delete chunks unused for this long; 0s: all that nobody holds or pins."
    )
