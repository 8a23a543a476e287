"""Which root is at which URL: notices a host whose mount is missing before it fills the empty mount point."""

from __future__ import annotations

from kvstore.errors import RootMismatch, Unavailable
from kvstore.meta.deadline import TRIES_MAX, Deadline
from kvstore.meta.interface import Absent, Meta, Put
from kvstore.meta.keys import root_binding


def bind_root(meta: Meta, url: str, root_id: bytes, timeout_s: float | None = None) -> None:
    """Records that the root at ``url`` has ``root_id``, or checks it where that is recorded already.

    Raises RootMismatch where another root was found there before, Unavailable where the store did not answer.
    """
    key = root_binding(url)
    deadline = Deadline(timeout_s)
    tries_left = TRIES_MAX
    while True:
        found = meta.get(key, deadline.left_s(0.5))
        if found is not None and found.value == root_id:
            return
        if found is not None:
            raise RootMismatch(
                f"{url} has root {root_id.hex()}, but this cluster knows root {found.value.hex()} there: is the "
                f"right file system mounted? If the root was replaced on purpose, delete the key {key} in etcd"
            )
        try:
            meta.txn((Absent(key),), (Put(key, root_id),), deadline.left_s(0.5))
        except Unavailable:
            # Unknown: read back in the next round.
            tries_left -= 1
            if not tries_left or deadline.over:
                raise
        if deadline.over:
            raise Unavailable(f"the root at {url} could not be recorded in time: the call may be repeated")


def bound_root(meta: Meta, url: str, timeout_s: float | None = None) -> bytes | None:
    """The id of the root that this cluster knows at ``url``; None where it knows none. Raises Unavailable."""
    found = meta.get(root_binding(url), timeout_s)
    return found.value if found else None
