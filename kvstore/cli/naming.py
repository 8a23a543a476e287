"""Which namespace a command means: its name, and what tells namesakes apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from kvstore.errors import InvalidRequest
from kvstore.namespace import Namespace

F = TypeVar("F", bound=Callable[..., Any])


def namespace_options(command: F) -> F:
    """``--tenant`` and ``--fingerprint``."""
    command = click.option("--fingerprint", help="Digest of the weights, where a name has several (a prefix will do).")(
        command
    )
    return click.option("--tenant", default="", help="The namespace's tenant.")(command)


def choose_namespace(found: Sequence[Namespace], name: str, tenant: str, fingerprint: str | None) -> Namespace:
    """The one namespace that is meant. Raises InvalidRequest where there is none, or several."""
    candidates = [each for each in found if each.name == name and each.tenant == tenant]
    if fingerprint is not None:
        candidates = [each for each in candidates if each.fingerprint.startswith(fingerprint)]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        said = ", ".join(repr(each.fingerprint) for each in candidates[:8])
        raise InvalidRequest(
            f"namespace {name!r} has {len(candidates)} variants (fingerprints {said}): give --fingerprint"
        )
    tenants = sorted({each.tenant for each in found if each.name == name})
    if tenants and tenant not in tenants:
        raise InvalidRequest(f"namespace {name!r} is of tenant {', '.join(map(repr, tenants))}: give --tenant")
    known = sorted({each.name for each in found})
    listed = ", ".join(known[:10]) + (", ..." if len(known) > 10 else "")
    raise InvalidRequest(f"there is no namespace {name!r}; there are: {listed or 'none'}")
