"""Settings of an engine: a dataclass declares them, they are checked, and the store that they name is opened.

The keys that say where the store is are the same for every engine. An engine adds its own as fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import kvstore
from kvstore.client import Store
from kvstore.client.limits import ClientLimits
from kvstore.errors import InvalidRequest
from kvstore.node.limits import Limits
from kvstore.node.settings import TierSettings
from kvstore.security.tls import ClientTls

MEMORY_KEYS = frozenset({"memory", "write"})
"""Keys that a store needs only to read and write, not to look up."""
_WITH_ROOT = ("etcd", "durability", "root_options", *sorted(MEMORY_KEYS))
"""Keys for which workers have their own settings."""
_TLS = ("tls_ca", "tls_cert", "tls_key", "tls_server_name")
_WITH_CONNECT = (*_TLS, "token_file")
"""Keys that only workers use: files that authenticate this client and the workers."""
PLACE_KEYS = frozenset({"root", "connect", *_WITH_ROOT, *_WITH_CONNECT})
"""Keys that say where the store is."""


def setting(default: Any, *, least: float = 1e-3, most: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    """Declares a field that may be set: a value of the default's type, a number in bounds, or one of ``choices``."""
    return field(default=default, metadata={"least": least, "most": most, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """Base of an engine's settings. Raises InvalidRequest for values that make no sense."""

    place: Mapping[str, Any] = field(default_factory=dict)
    """The keys in ``PLACE_KEYS``: ``root`` and ``etcd``, or ``connect``, and those that belong to them."""
    lookup_timeout_s: float = setting(2.0)
    """A look-up that takes longer is a miss."""
    load_timeout_s: float = setting(10.0)
    """A read that takes longer is a miss."""
    store_timeout_s: float = setting(30.0)
    """A store that takes longer has failed."""
    tenant: str = ""
    """The owner of the KV: tenants share nothing."""

    def __post_init__(self) -> None:
        for each in fields(self):
            expected = _expected(getattr(self, each.name), each.default, each.metadata)
            if expected:
                raise InvalidRequest(f"{each.name}={getattr(self, each.name)!r}: expected {expected}")

    @classmethod
    def known_keys(cls) -> frozenset[str]:
        """Returns every key that may be given."""
        return PLACE_KEYS | {each.name for each in fields(cls)} - {"place"}

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str) -> Self:
        """Makes settings from a mapping with these keys and no others; ``where`` names it in messages."""
        check_keys(given, cls.known_keys(), where)
        place = {key: value for key, value in given.items() if key in PLACE_KEYS}
        try:
            return cls(place=place, **{key: value for key, value in given.items() if key not in PLACE_KEYS})
        except InvalidRequest as wrong:
            raise InvalidRequest(f"{where}: {wrong}") from wrong

    def open(self) -> Store:
        """Opens the store. Raises what ``kvstore.open`` and ``kvstore.connect`` raise."""
        match_s, read_s, write_s = self.lookup_timeout_s, self.load_timeout_s, self.store_timeout_s
        place = self.place
        connect = place.get("connect")
        if place.get("root"):
            limits = Limits(
                match_deadline_s=match_s,
                read_deadline_s=read_s,
                write_deadline_s=write_s,
                meta_deadline_s=min(Limits().meta_deadline_s, write_s),
            )
            return kvstore.open(
                place["root"],
                place.get("etcd") or None,
                durability=place.get("durability", "none"),
                root_options=place.get("root_options"),
                limits=limits,
                **_memory(place),
            )
        tls = [place.get(key) for key in _TLS]
        return kvstore.connect(
            *([connect] if isinstance(connect, str) else connect or ()),
            limits=ClientLimits(match_s=match_s, read_s=read_s, write_s=write_s),
            tls=ClientTls(*tls) if any(tls) else None,
            token_file=place.get("token_file"),
        )


def check_keys(given: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    """Raises InvalidRequest for unknown keys, and for wrong keys about where the store is.

    An unknown key is an error, because a misspelt one would be silently ignored.
    """
    unknown = sorted(map(str, set(given) - known))
    if unknown:
        raise InvalidRequest(f"{where} has unknown keys {', '.join(unknown)}: expected {', '.join(sorted(known))}")
    if bool(given.get("root")) == bool(given.get("connect")):
        raise InvalidRequest(
            f"{where} names {'both' if given.get('root') else 'neither'} of root and connect: give "
            '{"root": URL}, with "etcd" where there is a cluster, or {"connect": "HOST:PORT"}'
        )
    _check_beside(given, where)
    for key in PLACE_KEYS & set(given):
        expected = _expected_place(key, given[key])
        if expected and given[key] is not None:
            raise InvalidRequest(f"{where}: {key}={given[key]!r}: expected {expected}")
    try:
        TierSettings.of(**_memory(given))
    except InvalidRequest as wrong:
        raise InvalidRequest(f"{where}: {wrong}") from wrong


def _check_beside(given: Mapping[str, Any], where: str) -> None:
    """Raises InvalidRequest for keys that exclude each other."""
    for way, keys, why in (
        ("connect", _WITH_ROOT, "they apply only to a root that is opened here; workers have their own"),
        ("root", _WITH_CONNECT, "they apply only to workers (connect)"),
    ):
        ignored = [key for key in keys if given.get(key)]
        if given.get(way) and ignored:
            raise InvalidRequest(f"{where} has {' and '.join(ignored)} beside {way}: {why}")
    if given.get("write") and not given.get("memory"):
        raise InvalidRequest(
            f"{where} has write without memory: write says how puts use the memory tier; give memory as well"
        )


def _expected_place(key: str, value: Any) -> str:
    """Describes the expected value of a key about where the store is; empty if ``value`` fits."""
    if key in _WITH_CONNECT:
        return "" if isinstance(value, str) else "the name of a file, or of a server"
    if key in ("connect", "etcd"):
        several = isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
        return "" if isinstance(value, str) or several else "HOST:PORT, or a list of such"
    if key == "root_options":
        return "" if isinstance(value, Mapping) else "a mapping, as fsspec takes it"
    return ""


def _expected(value: Any, default: Any, bounds: Mapping[str, Any]) -> str:
    """Describes the expected value of a setting with this default; empty if ``value`` fits."""
    if isinstance(default, bool | str):
        choices = bounds.get("choices")
        if choices:
            return "" if value in choices else f"one of {', '.join(choices)}"
        return "" if isinstance(value, type(default)) else {bool: "true or false", str: "text"}[type(default)]
    if not isinstance(default, int | float):
        return ""
    least, most = bounds["least"], bounds["most"]
    kind = int if isinstance(default, int) else (int, float)
    if isinstance(value, kind) and not isinstance(value, bool) and least <= value and (most is None or value <= most):
        return ""
    number = "a whole number" if isinstance(default, int) else "a number"
    return f"{number} of at least {least:g}" + (f" and at most {most:g}" if most is not None else "")


def _memory(place: Mapping[str, Any]) -> dict[str, Any]:
    return {key: place[key] for key in MEMORY_KEYS if place.get(key) is not None}
