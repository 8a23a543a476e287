"""Ending things that may never end: for clean-up that others' code does, without a deadline of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

CLOSE_S = 2.0


def within(seconds: float, work: Callable[[], object]) -> bool:
    """Does ``work`` in a thread of its own and waits at most ``seconds``; whether it ended.

    For closing a gRPC channel: it waits without limit for a call that a signal's exception left behind half-way.
    """
    thread = threading.Thread(target=work, name="kvstore-close", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
