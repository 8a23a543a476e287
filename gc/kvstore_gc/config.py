"""The configuration by an operator, from a file and from options, and the goals that follow from it.

The file (``--policy``) is TOML; options override it:

    ttl = "7d"                  # nothing stays unused for longer
    max_bytes = "2TiB"          # the capacity; by default all the space there is
    order = "uses"              # or "lru": which chunks go first

    [[quota]]                   # room for all namespaces of a tenant together
    tenant = "acme"
    max_bytes = "200GiB"

    [[quota]]                   # or for those of one name, of any tenant unless one is named
    namespace = "llama-3.1-8b"
    max_bytes = "50GiB"
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.core.namespace import Namespace
from kvstore.core.validate import why
from kvstore.errors import InvalidRequest
from kvstore_gc.policy import EvictionOrder, Goals, NamespaceQuota

FILE_BYTES_MAX = 1 << 20
_KEYS = frozenset({"ttl", "max_bytes", "order", "quota"})
_QUOTA_KEYS = frozenset({"tenant", "namespace", "max_bytes"})


@dataclass(frozen=True, slots=True)
class QuotaRule:
    """A quota as configured: for a tenant, a namespace's name, or both; None: any."""

    tenant: str | None
    namespace: str | None
    max_bytes: int

    @property
    def label(self) -> str:
        """The quota's name in messages."""
        parts = [("tenant", self.tenant), ("namespace", self.namespace)]
        return " ".join(f"{what} {name!r}" for what, name in parts if name is not None)

    def covers(self, namespace: Namespace) -> bool:
        """True if a namespace counts towards it."""
        return self.tenant in (None, namespace.tenant) and self.namespace in (None, namespace.name)


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration. ``max_bytes`` None: all the space there is."""

    ttl_s: float | None = None
    max_bytes: int | None = None
    order: EvictionOrder = EvictionOrder.USES
    shares: tuple[QuotaRule, ...] = ()

    def goals(self, namespaces: Sequence[Namespace]) -> Goals:
        """The goals for these namespaces. Raises InvalidRequest if the configuration is inconsistent."""
        quotas = tuple(
            NamespaceQuota(
                share.label, frozenset(each.id for each in namespaces if share.covers(each)), share.max_bytes
            )
            for share in self.shares
        )
        return Goals(self.ttl_s, quotas, self.order)


def read_config(path: str, seconds: Callable[[Any], float], size: Callable[[Any], int]) -> Config:
    """Reads a policy file. ``seconds`` and ``size`` parse durations and sizes as people write them.

    Raises InvalidRequest if the file cannot be read, or contains something unknown.
    """
    fields = _read(path)
    _known(path, fields, _KEYS)
    config = Config()
    try:
        return Config(
            ttl_s=seconds(fields["ttl"]) if "ttl" in fields else None,
            max_bytes=size(fields["max_bytes"]) if "max_bytes" in fields else None,
            order=EvictionOrder(fields.get("order", config.order.value)),
            shares=tuple(_share(path, each, size) for each in _tables(path, fields.get("quota", []))),
        )
    except ValueError as cause:
        raise InvalidRequest(f"{path}: {cause}") from cause


def _share(path: str, fields: dict[str, Any], size: Callable[[Any], int]) -> QuotaRule:
    _known(f"{path}: a quota", fields, _QUOTA_KEYS)
    names = [fields.get(what) for what in ("tenant", "namespace")]
    if names == [None, None] or not all(name is None or isinstance(name, str) for name in names):
        raise InvalidRequest(f"{path}: a quota has no owner: give tenant or namespace, as text")
    if "max_bytes" not in fields:
        raise InvalidRequest(f'{path}: the quota of {names[0] or names[1]!r} has no max_bytes: write "20GiB"')
    return QuotaRule(names[0], names[1], size(fields["max_bytes"]))


def _tables(path: str, found: Any) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise InvalidRequest(f"{path}: quota is not a list of tables: write [[quota]]")
    return found


def _known(where: str, fields: dict[str, Any], keys: frozenset[str]) -> None:
    unknown = sorted(fields.keys() - keys)
    if unknown:
        raise InvalidRequest(
            f"{where} has unknown keys {', '.join(map(repr, unknown))}: expected {', '.join(sorted(keys))}"
        )


def _read(path: str) -> dict[str, Any]:
    try:
        if Path(path).stat().st_size > FILE_BYTES_MAX:
            raise InvalidRequest(f"the policy {path!r} is over {FILE_BYTES_MAX} bytes")
        return tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as cause:
        raise InvalidRequest(f"cannot read the policy {path!r}: {why(cause)}") from cause
    except tomllib.TOMLDecodeError as cause:
        raise InvalidRequest(f"the policy {path!r} is not TOML: {cause}") from cause
