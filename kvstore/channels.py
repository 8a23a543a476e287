"""Whether gRPC works in this process: in a child that was forked after its parent had used it, it does not.

gRPC's threads do not live on in a forked child, and it does not find that out: calls there wait for ever, past their
deadlines, also on channels that the child makes. So it is told instead. A parent that closed its channels before is no
better: gRPC ends its threads some time later, and does not say when.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from kvstore.errors import InvalidRequest

T = TypeVar("T")

_is_used = False
_is_cut_off = False


def open_channel(target: str, make: Callable[[], T]) -> T:
    """The channel that ``make`` makes. Raises InvalidRequest in a child of a process that had one before the fork."""
    global _is_used
    if _is_cut_off:
        raise InvalidRequest(
            f"no connection to {target}: this process was forked from one that had connected before, and gRPC's "
            "threads are not here: start it by spawn (multiprocessing.get_context('spawn')), or fork before the "
            "parent connects"
        )
    _is_used = True
    return make()


def _forked() -> None:
    """In a child. Where gRPC's own handlers are on (kvstore/__init__.py), they see to its threads."""
    global _is_cut_off
    _is_cut_off = _is_used and os.environ.get("GRPC_ENABLE_FORK_SUPPORT") == "0"


os.register_at_fork(after_in_child=_forked)
