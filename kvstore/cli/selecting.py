"""Options that say which chunks are meant, shared by the commands that do something to many: ``asked``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvstore.census.selection import Selection
from kvstore.cli.kinds import DURATION, MOMENT
from kvstore.cli.naming import choose_namespace

if TYPE_CHECKING:
    from kvstore.client.store import Store

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Asked:
    """What was typed."""

    name: str | None
    tenant: str | None
    fingerprint: str
    older_than_s: float
    written_by: str
    since_s: float
    until_s: float

    @property
    def is_namespace_alone(self) -> bool:
        """Whether a namespace is named, and nothing is said of its chunks."""
        return self.name is not None and not (self.older_than_s or self.written_by or self.since_s or self.until_s)

    def selection(self, store: Store) -> Selection:
        """The same as the store understands it. Raises InvalidRequest where nothing is meant, or no such namespace."""
        digest, tenant, fingerprint = None, self.tenant, self.fingerprint
        if self.name is not None:
            digest = choose_namespace(store.namespaces(), self.name, tenant or "", fingerprint or None).digest
            tenant, fingerprint = None, ""
        return Selection(digest, tenant, fingerprint, self.older_than_s, self.written_by, self.since_s, self.until_s)


def selection_options(command: F) -> F:
    """``NAME``, ``--tenant``, ``--fingerprint``, ``--older-than``, ``--written-by``, ``--since``, ``--until``."""

    @click.argument("name", required=False)
    @click.option("--tenant", help="Of this tenant ('' for none); beside NAME, the namespace's tenant.")
    @click.option("--fingerprint", default="", help="Of weights whose digest begins so.")
    @click.option("--older-than", "older_than_s", type=DURATION, default=0.0, help="Not used for so long, such as 30d.")
    @click.option(
        "--written-by",
        default="",
        metavar="WHO",
        help="Written by a session, or by label=, version=, host= or node= with a value (kvstore ls --lineage).",
    )
    @click.option(
        "--since", "since_s", type=MOMENT, default=0.0, help="Written then or later: 2026-11-21T10:00, or 2h."
    )
    @click.option("--until", "until_s", type=MOMENT, default=0.0, help="Written before that.")
    @functools.wraps(command)
    def wrapped(
        *args: Any,
        name: str | None,
        tenant: str | None,
        fingerprint: str,
        older_than_s: float,
        written_by: str,
        since_s: float,
        until_s: float,
        **kwargs: Any,
    ) -> Any:
        asked = Asked(name, tenant, fingerprint, older_than_s, written_by, since_s, until_s)
        return command(*args, asked=asked, **kwargs)

    return wrapped  # type: ignore[return-value]
