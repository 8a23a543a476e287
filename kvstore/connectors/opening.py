"""The settings of an engine: one table, which checks what is given and opens the store.

Each setting is a field with its kind of value, its default and what it means. The keys that say where the store is are
the same for every engine. An engine adds its own as fields of a subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import kvstore
from kvstore.client import Store
from kvstore.client.limits import ClientLimits
from kvstore.errors import InvalidRequest
from kvstore.node.limits import Limits
from kvstore.node.settings import AskedBound, TierSettings
from kvstore.security.tls import ClientTls


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: the words for it in an error, and the check."""

    expected: str
    holds: Callable[[Any], bool]


def number(default: float, *, least: float = 1e-3, most: float | None = None) -> Any:
    """A setting that is a number within bounds; a whole one if its default is one."""
    types = int if isinstance(default, int) else (int, float)

    def holds(value: Any) -> bool:
        is_number = isinstance(value, types) and not isinstance(value, bool)
        return is_number and least <= value and (most is None or value <= most)

    expected = f"a {'whole ' * isinstance(default, int)}number of at least {least:g}"
    if most is not None:
        expected += f" and at most {most:g}"
    return setting(default, Kind(expected, holds))


def choice(default: str, *others: str) -> Any:
    """A setting that is one of some names."""
    names = (default, *others)
    return setting(default, Kind(f"one of {', '.join(names)}", lambda value: value in names))


def setting(default: Any, kind: Kind | None = None, *, way: str = "") -> Any:
    """A setting of some other kind, or of any: then who uses it checks it.

    One with a ``way``, ``root`` or ``connect``, goes with that key alone.
    """
    return field(default=default, metadata={"kind": kind, "way": way})


def _are_servers(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
    return isinstance(value, str) or is_list


_PLAIN = {
    bool: Kind("true or false", lambda value: isinstance(value, bool)),
    str: Kind("text", lambda value: isinstance(value, str)),
}
"""The kinds of settings that are plain fields, by the types of their defaults."""
_SERVERS = Kind("HOST:PORT, or a list of such", _are_servers)
_MAPPING = Kind("a mapping, as fsspec takes it", lambda value: isinstance(value, Mapping))
_FILE = Kind("the name of a file, or of a server", lambda value: isinstance(value, str))
_BOUND = Kind('a number of bytes, "auto" or null', lambda value: value is None or isinstance(value, int))

_BESIDE = {
    "root": "only a store that is opened by root takes them, workers have their own",
    "connect": "only workers ask for them, see connect",
}
"""Why a key that goes with one way makes no sense beside the other."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of an engine's settings. Raises InvalidRequest for values that make no sense."""

    root: str | None = setting(None, way="root")
    """URL of the root. The store is opened in the engine's own processes."""
    etcd: str | Sequence[str] | None = setting(None, _SERVERS, way="root")
    """The cluster's etcd; None if the root has one node."""
    durability: str | None = setting(None, way="root")
    """As ``kvstore.open`` takes it."""
    root_options: Mapping[str, Any] | None = setting(None, _MAPPING, way="root")
    """As ``kvstore.open`` takes them."""
    memory: int | None = setting(None, way="root")
    """Bytes of memory for hot chunks. A store needs it to read and write, not to look up."""
    write: str | None = setting(None, way="root")
    """With ``memory``: the write mode."""
    max_bytes: int | str | None = setting("auto", _BOUND, way="root")
    """Without ``etcd``: bytes that the root's files may take, "auto" for a share of the disk, None for no bound."""
    ttl: float | None = setting(None, way="root")
    """Without ``etcd``: seconds after which unused chunks go."""
    connect: str | Sequence[str] | None = setting(None, _SERVERS, way="connect")
    """Addresses of workers, instead of ``root``."""
    tls_ca: str | None = setting(None, _FILE, way="connect")
    """Certificates that workers are checked by."""
    tls_cert: str | None = setting(None, _FILE, way="connect")
    """The engine's own certificate."""
    tls_key: str | None = setting(None, _FILE, way="connect")
    """The key of that certificate."""
    tls_server_name: str | None = setting(None, _FILE, way="connect")
    """The name in the workers' certificates, if it is not their host's."""
    token_file: str | None = setting(None, _FILE, way="connect")
    """A file with the token that the engine shows to workers."""
    lookup_timeout_s: float = number(2.0)
    """A look-up that takes longer is a miss."""
    load_timeout_s: float = number(10.0)
    """A read that takes longer is a miss."""
    store_timeout_s: float = number(30.0)
    """A store that takes longer has failed."""
    tenant: str = ""
    """The owner of the KV: tenants share nothing."""

    def __post_init__(self) -> None:
        self._check_ways()
        for each in fields(self):
            value, kind = getattr(self, each.name), each.metadata.get("kind") or _PLAIN.get(type(each.default))
            if kind is not None and value is not each.default and not kind.holds(value):
                raise InvalidRequest(f"{each.name}={value!r}: expected {kind.expected}")
        if self.write and not self.memory:
            raise InvalidRequest("write without memory: it says when memory is enough for a put; give memory")
        TierSettings.of(**self.given("memory", "write"))
        if AskedBound.of(self.max_bytes, self.ttl).is_explicit and self.etcd:
            raise InvalidRequest("max_bytes and ttl beside etcd: kvstore-gc bounds a cluster's root, give them to that")

    @classmethod
    def names(cls) -> frozenset[str]:
        """Every key that may be given."""
        return frozenset(each.name for each in fields(cls))

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str = "the settings") -> Self:
        """Makes settings from a mapping with these keys and no others; ``where`` names it in messages.

        A key that nobody reads is an error, because a misspelt one would be ignored in silence.
        """
        unknown = sorted(map(str, set(given) - cls.names()))
        if unknown:
            raise InvalidRequest(
                f"{where} has unknown keys {', '.join(unknown)}: expected {', '.join(sorted(cls.names()))}"
            )
        try:
            return cls(**given)
        except InvalidRequest as wrong:
            raise InvalidRequest(f"{where}: {wrong}") from wrong

    def given(self, *names: str) -> dict[str, Any]:
        """Those of these settings that are not None."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def place(self) -> dict[str, Any]:
        """The settings that say where the store is, as far as they were given."""
        return self.given(*(each.name for each in fields(self) if each.metadata.get("way")))

    def open(self) -> Store:
        """Opens the store. Raises what ``kvstore.open`` and ``kvstore.connect`` raise."""
        match_s, read_s, write_s = self.lookup_timeout_s, self.load_timeout_s, self.store_timeout_s
        if self.root:
            limits = Limits(
                match_deadline_s=match_s,
                read_deadline_s=read_s,
                write_deadline_s=write_s,
                meta_deadline_s=min(Limits().meta_deadline_s, write_s),
            )
            options = self.given("durability", "root_options", "memory", "write")
            bound: dict[str, Any] = {"max_bytes": self.max_bytes, "ttl": self.ttl}  # checked at the start
            return kvstore.open(self.root, self.etcd or None, limits=limits, **bound, **options)
        tls = (self.tls_ca, self.tls_cert, self.tls_key, self.tls_server_name)
        return kvstore.connect(
            *([self.connect] if isinstance(self.connect, str) else self.connect or ()),
            limits=ClientLimits(match_s=match_s, read_s=read_s, write_s=write_s),
            tls=ClientTls(*tls) if any(tls) else None,
            token_file=self.token_file,
        )

    def _check_ways(self) -> None:
        """Raises InvalidRequest unless one way to the store is named, and only keys that go with it."""
        if bool(self.root) == bool(self.connect):
            raise InvalidRequest(
                f"{'both' if self.root else 'neither'} of root and connect: give "
                '{"root": URL}, with "etcd" where there is a cluster, or {"connect": "HOST:PORT"}'
            )
        way, other = ("root", "connect") if self.root else ("connect", "root")
        ignored = [
            each.name
            for each in fields(self)
            if each.metadata.get("way") == other and getattr(self, each.name) not in (None, each.default)
        ]
        if ignored:
            raise InvalidRequest(f"{' and '.join(ignored)} beside {way}: {_BESIDE[other]}")
