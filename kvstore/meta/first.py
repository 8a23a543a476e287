"""Writes keys that the first writer makes and all others accept. A lost reply is settled by reading back."""

from __future__ import annotations

from kvstore.errors import Unavailable
from kvstore.meta.deadline import TRIES_MAX, Deadline
from kvstore.meta.interface import Absent, Meta, Put


def put_first(meta: Meta, key: str, value: bytes, deadline: Deadline, what: str) -> bytes:
    """Writes ``value`` unless the key exists; returns the value that it has afterwards.

    Raises Unavailable, naming ``what``, if that stays unknown: the call may be repeated.
    """
    tries_left = TRIES_MAX
    while True:
        found = meta.get(key, deadline.left_s(0.5))
        if found is not None:
            return found.value
        if deadline.over:
            raise Unavailable(f"{what} could not be recorded in etcd in time: the call may be repeated")
        try:
            meta.txn((Absent(key),), (Put(key, value),), deadline.left_s(0.5))
        except Unavailable:
            # Unknown: the next round reads back, and a late transaction meets the compare.
            tries_left -= 1
            if not tries_left or deadline.over:
                raise
