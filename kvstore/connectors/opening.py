"""How an engine's settings say where the store is: the same keys for every engine, checked in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kvstore
from kvstore.client import Store
from kvstore.client.limits import ClientLimits
from kvstore.errors import InvalidRequest
from kvstore.node.limits import Limits
from kvstore.node.settings import TierSettings
from kvstore.security.tls import ClientTls

PLACE_KEYS = frozenset(
    {"root", "etcd", "connect", "durability", "root_options", "memory", "write"}
    | {"tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file"}
)
"""Keys that say where the store is; an engine may add its own."""

MEMORY_KEYS = frozenset({"memory", "write"})
"""What a store that only looks has no use for."""

_WITH_ROOT = ("etcd", "durability", "root_options", "memory", "write")
"""What a worker has settings of its own for."""

_WITH_CONNECT = ("tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file")
"""What only workers ask for: files that prove who we are, and who they are."""

_EITHER = 'give {"root": URL}, with "etcd" where there is a cluster, or {"connect": "HOST:PORT"}'


def check_keys(settings: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    """Raises InvalidRequest for a key that nobody reads: a misspelt one would be ignored in silence.

    And for keys that say where the store is and make no sense, alone or together.
    """
    unknown = sorted(map(str, set(settings) - known))
    if unknown:
        raise InvalidRequest(f"{where} has unknown keys {', '.join(unknown)}: expected {', '.join(sorted(known))}")
    if bool(settings.get("root")) == bool(settings.get("connect")):
        raise InvalidRequest(
            f"{where} names {'both' if settings.get('root') else 'neither'} of root and connect: {_EITHER}"
        )
    ignored = [key for key in _WITH_ROOT if settings.get(key)]
    if settings.get("connect") and ignored:
        raise InvalidRequest(
            f"{where} has {' and '.join(ignored)} beside connect: only a store that is opened by root takes them, "
            "workers have their own"
        )
    ignored = [key for key in _WITH_CONNECT if settings.get(key)]
    if settings.get("root") and ignored:
        raise InvalidRequest(f"{where} has {' and '.join(ignored)} beside root: only workers ask for them, see connect")
    for key in _WITH_CONNECT:
        if settings.get(key) is not None and not isinstance(settings[key], str):
            raise InvalidRequest(f"{where}: {key}={settings[key]!r}: expected the name of a file, or of a server")
    for key in ("connect", "etcd"):
        value = settings.get(key)
        if value is not None and not (
            isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(each, str) for each in value))
        ):
            raise InvalidRequest(f"{where}: {key}={value!r}: expected HOST:PORT, or a list of such")
    options = settings.get("root_options")
    if options is not None and not isinstance(options, Mapping):
        raise InvalidRequest(f"{where}: root_options={options!r}: expected a mapping, as fsspec takes it")
    if settings.get("write") and not settings.get("memory"):
        raise InvalidRequest(f"{where} has write without memory: it says when memory is enough for a put; give memory")
    try:
        TierSettings.of(**_memory(settings))
    except InvalidRequest as wrong:
        raise InvalidRequest(f"{where}: {wrong}") from wrong


def open_store(settings: Mapping[str, Any], *, match_s: float, read_s: float, write_s: float) -> Store:
    """The store that ``settings`` name, with deadlines for look-ups, reads and writes in seconds.

    Raises as ``kvstore.open`` and ``kvstore.connect`` do.
    """
    root, connect, etcd = settings.get("root"), settings.get("connect"), settings.get("etcd")
    if root:
        limits = Limits(
            match_deadline_s=match_s,
            read_deadline_s=read_s,
            write_deadline_s=write_s,
            meta_deadline_s=min(Limits().meta_deadline_s, write_s),
        )
        return kvstore.open(
            root,
            etcd or None,
            durability=settings.get("durability", "none"),
            root_options=settings.get("root_options"),
            limits=limits,
            **_memory(settings),
        )
    workers = [connect] if isinstance(connect, str) else list(connect or ())
    return kvstore.connect(
        *workers,
        limits=ClientLimits(match_s=match_s, read_s=read_s, write_s=write_s),
        tls=_tls(settings),
        token_file=settings.get("token_file"),
    )


def _memory(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: settings[key] for key in MEMORY_KEYS if settings.get(key) is not None}


def _tls(settings: Mapping[str, Any]) -> ClientTls | None:
    given = [settings.get(key) for key in ("tls_ca", "tls_cert", "tls_key", "tls_server_name")]
    return ClientTls(*given) if any(given) else None
