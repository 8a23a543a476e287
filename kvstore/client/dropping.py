"""Stores dropped without ``close()``: they warn, and their threads and connections still end."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from weakref import finalize

from kvstore.client.port import Port


def close_when_dropped(port: Port, close: Callable[[], None], name: str) -> finalize[..., Port]:
    """Calls ``close``, with a ResourceWarning, once nothing refers to ``port``. Detach the finalizer before closing.

    ``close`` must not refer to the port, or the port would never be collected. Nothing happens when the interpreter
    ends: the threads are daemons, and the system closes the rest.
    """
    finalizer = finalize(port, _close_dropped, close, name, os.getpid())
    finalizer.atexit = False
    return finalizer


def _close_dropped(close: Callable[[], None], name: str, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child: threads and connections belong to its parent
    # The garbage collector calls this in any thread at any point, perhaps while that thread has a lock that closing
    # needs. So another thread closes, and this one takes no lock of ours.
    with suppress(RuntimeError):  # no thread can start: the interpreter ends, or the system has no room
        threading.Thread(target=close, name="kvstore-closing", daemon=True).start()
    # Last: this raises if warnings are errors.
    warnings.warn(
        f"kvstore: the store of {name} was dropped without close(); it is being closed now. Call close(), or use the "
        "store as a context (with ... as store:)",
        ResourceWarning,
        stacklevel=2,
    )
