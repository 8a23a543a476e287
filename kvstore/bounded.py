"""A deadline for clean-up by other libraries, which may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable

CLOSE_S = 2.0


def within(seconds: float, work: Callable[[], object]) -> bool:
    """Runs ``work`` in a thread of its own and waits at most ``seconds``; True if it ended.

    For closing a gRPC channel: it waits without limit for a call that a signal's exception left behind half-way.
    """
    thread = threading.Thread(target=work, name="kvstore-close", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
