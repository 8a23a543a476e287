"""Roots that must be there already: a mistyped path is an error, not a new empty folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from kvstore.errors import InvalidRequest
from kvstore.format import places
from kvstore.format.places import Name
from kvstore.namespace import NamespaceId
from kvstore.sources import RandomIds

if TYPE_CHECKING:
    from kvstore.client.store import Store
    from kvstore.root.identity import RootIdentity
    from kvstore.root.interface import Root


def local_path(url: str) -> str | None:
    """The absolute path of a root that is a folder; None for any other URL."""
    path = url.removeprefix("file://") if url.startswith("file://") else url
    return None if "://" in path else os.path.abspath(os.path.expanduser(path))


def open_existing(url: str, options: Mapping[str, Any]) -> Root:
    """Opens a root without making its folder. Raises as ``open_root``."""
    from kvstore.root.open import open_root

    return open_root(url, options, create=False)


def check_pins_known(store: Store, *, instead: str = "") -> None:
    """Raises InvalidRequest if a store was opened by this process alone, which sees nobody's pins."""
    from kvstore.client.local import LocalPort
    from kvstore.node.member import Sharing

    port = store._port
    if not isinstance(port, LocalPort):
        return
    member = port._store.member
    if member.sharing is not Sharing.ALONE or member.host is not None:
        return
    cause = "the pins of this root are in etcd, or it has none: give --etcd ENDPOINTS, or --connect HOST:PORT"
    raise InvalidRequest(cause + instead)


@contextmanager
def identified(url: str, options: Mapping[str, Any]) -> Iterator[tuple[Root, RootIdentity]]:
    """Opens a root and reads its identity. Raises RootMismatch if it has none, and as ``open_root``."""
    from kvstore.root.identity import create_or_open

    with closing(open_existing(url, options)) as root:
        yield root, create_or_open(root, RandomIds(), create=False)


def usage_by_namespace(
    url: str, options: Mapping[str, Any], counted: Callable[[int], object]
) -> dict[NamespaceId, tuple[int, int]]:
    """Chunks and bytes (headers included) by namespace id. ``counted`` is called with the files of each folder.

    Names carry the namespace, so no file is opened. A chunk that is written or deleted meanwhile may be counted or not.
    Raises the root's errors.
    """
    found: dict[NamespaceId, tuple[int, int]] = {}
    with closing(open_existing(url, options)) as root:
        for folder in root.list(places.CHUNKS):
            if folder.stat is not None:
                continue
            files = 0
            for entry in root.list(Name(f"{places.CHUNKS}/{folder.name}")):
                parsed = places.parse_chunk(entry.name)
                if parsed is None or entry.stat is None:
                    continue
                chunks, size_bytes = found.get(parsed[1], (0, 0))
                found[parsed[1]] = (chunks + 1, size_bytes + entry.stat.size_bytes)
                files += 1
            counted(files)
    return found
