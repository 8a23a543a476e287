"""Stores that were dropped without ``close()``: they warn, and their threads and connections end all the same."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from weakref import finalize

from kvstore.client.port import Port


def close_when_dropped(port: Port, close: Callable[[], None], name: str) -> finalize[..., Port]:
    """Has ``close`` called, with a ResourceWarning, once nothing refers to ``port`` any more. Detach it before closing.

    ``close`` must not refer to the port, or the port would live for ever.  At the end of the interpreter nothing
    happens: the threads are daemons, and the system closes the rest.
    """
    finalizer = finalize(port, _close_dropped, close, name, os.getpid())
    finalizer.atexit = False
    return finalizer


def _close_dropped(close: Callable[[], None], name: str, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child: threads and connections are its parent's
    # The garbage collector calls this in any thread, between any two lines, perhaps while that thread has a lock that
    # closing needs.  So another thread closes, and this one waits for no lock of ours.
    with suppress(RuntimeError):  # no thread can be started: the interpreter ends, or the system has no room for one
        threading.Thread(target=close, name="kvstore-closing", daemon=True).start()
    # Last: where warnings are errors, this raises.
    warnings.warn(
        f"kvstore: the store of {name} was dropped without close(); it is being closed now. Call close(), or use the "
        "store as a context (with ... as store:)",
        ResourceWarning,
        stacklevel=2,
    )
