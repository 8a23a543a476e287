"""The gRPC channels of this process; a child that was forked beside one gets none.

gRPC's threads do not live on in a forked child, and it does not find that out: calls there wait for ever, past their
deadlines, also on channels that the child makes. So it is told instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet

from kvstore.errors import InvalidRequest

T = TypeVar("T")

_open: WeakSet[Any] = WeakSet()
_is_cut_off = False


def open_channel(target: str, make: Callable[[], T]) -> T:
    """The channel that ``make`` makes. Raises InvalidRequest in a child of a process that had one at the fork."""
    if _is_cut_off:
        raise InvalidRequest(
            f"no connection to {target}: this process was forked from one that was connected, and gRPC's threads are "
            "not here: start it by spawn (multiprocessing.get_context('spawn')), or fork before the parent connects "
            "or after it has closed its stores"
        )
    channel = make()
    _open.add(channel)
    return channel


def close_channel(channel: Any) -> None:
    """Closes it; calls in progress are cancelled. Idempotent."""
    channel.close()
    _open.discard(channel)


def _forked() -> None:
    """In a child. Where gRPC's own handlers are on (kvstore/__init__.py), they see to its threads."""
    global _is_cut_off
    _is_cut_off = _is_cut_off or (bool(_open) and os.environ.get("GRPC_ENABLE_FORK_SUPPORT") == "0")


os.register_at_fork(after_in_child=_forked)
