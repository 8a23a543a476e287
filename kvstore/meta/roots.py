"""Records which root is at a URL: a node that finds another root there refuses it, such as an empty mount point."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import RootMismatch
from kvstore.meta.deadline import Deadline
from kvstore.meta.first import put_first
from kvstore.meta.interface import Meta
from kvstore.meta.keys import ID_BYTES, ROOTS, root_binding


def bind_root(meta: Meta, url: str, root_id: bytes, timeout_s: float | None = None) -> None:
    """Records that the root at ``url`` has ``root_id``, or checks it if that is recorded already.

    Raises RootMismatch if another root was found there before, Unavailable if the store did not answer.
    """
    key = root_binding(url)
    known = put_first(meta, key, root_id, Deadline(timeout_s), f"the root at {url}")
    if known != root_id:
        raise RootMismatch(
            f"{url} has root {root_id.hex()}, but this cluster knows root {known.hex()} there: is the right file "
            f"system mounted? If the root was replaced on purpose, run: {forget_command(url)}"
        )


def forget_command(url: str, endpoints: str | Sequence[str] = ()) -> str:
    """Returns the command that makes a cluster forget which root is at ``url``."""
    joined = endpoints if isinstance(endpoints, str) else ",".join(endpoints)
    return f"etcdctl {f'--endpoints={joined} ' if joined else ''}del {root_binding(url)}"


def bound_root(meta: Meta, url: str, timeout_s: float | None = None) -> bytes | None:
    """Returns the id of the root that this cluster knows at ``url``; None if it knows none. Raises Unavailable."""
    found = meta.get(root_binding(url), timeout_s)
    return found.value if found else None


def check_bound(meta: Meta, url: str, root_id: bytes) -> None:
    """Raises RootMismatch if this cluster knows another root at ``url``, Unavailable if its etcd does not answer."""
    if bound_root(meta, url) not in (None, root_id):
        raise RootMismatch(
            f"{url} is root {root_id.hex()}, but this etcd knows another root there: is the right file system mounted, "
            "and is it this cluster's etcd?"
        )


def known_roots(meta: Meta, timeout_s: float | None = None) -> list[bytes]:
    """The ids of all roots that this cluster knows, sorted. Raises Unavailable."""
    return sorted({kv.value for kv in meta.list(ROOTS, timeout_s).items if len(kv.value) == ID_BYTES})
