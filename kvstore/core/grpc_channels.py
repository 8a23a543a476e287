"""The rules for gRPC's connections: a reason in plain words where there is none, and a refusal after a fork.

gRPC does not work in a child that was forked after its parent had used it:
gRPC's threads do not survive a fork, and gRPC does not notice: calls in the child wait for ever, past their deadlines,
also on channels that the child makes. Closing the parent's channels first does not help: gRPC ends its threads some
time later, and does not say when.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from typing import TypeVar

from kvstore.errors import InvalidRequest

T = TypeVar("T")

_is_used = False
_is_cut_off = False


class UnreachableReason(enum.Enum):
    """A reason why there is no connection."""

    REFUSED = "nothing listens there", "connection refused"
    NO_SOCKET = "there is no such socket", "no such file"
    NO_PERMISSION = "its socket is open to another account only", "permission denied"
    NO_ADDRESS = "its name has no address", "resolving", "resolution failed"
    OTHER_NAME = "its certificate is for another name", "hostname verification", "verify peer"
    TLS = "TLS failed", "handshake"
    OTHER_PROTOCOL = "no such server listens there", "parsing http/2"
    SILENT = "what listens there does not speak", "settings frame"
    HUNG_UP = "it closes each connection immediately", "socket closed"
    NO_WAY = "there is no way to it", "failed to connect"

    def __init__(self, why: str, *parts: str) -> None:
        self.why = why
        self.parts = parts
        """Parts of what gRPC says, in lower case."""


def unreached(text: str) -> UnreachableReason | None:
    """Returns the reason in what gRPC says; None if there was a connection, and it ended."""
    lower = text.lower()
    if UnreachableReason.HUNG_UP.parts[0] in lower and UnreachableReason.NO_WAY.parts[0] not in lower:
        return None  # a connection that was good, and ended
    return next((each for each in UnreachableReason if any(part in lower for part in each.parts)), None)


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
    """Runs in the child. If gRPC's own fork handlers are on (kvstore/__init__.py), they take care of its threads."""
    global _is_cut_off
    _is_cut_off = _is_used and os.environ.get("GRPC_ENABLE_FORK_SUPPORT") == "0"


os.register_at_fork(after_in_child=_forked)
