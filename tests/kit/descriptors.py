"""Descriptors and threads of this process: counts, for tests that none is left; and a thread that it cannot have."""

from __future__ import annotations

import gc
import os
import threading

import pytest


def open_before() -> int:
    """Returns the open descriptors once the garbage of earlier tests is gone, which would close some later."""
    gc.collect()
    return open_now()


def open_now() -> int:
    """Returns the open descriptors; compare with ``<=``: threads of earlier tests may close theirs meanwhile."""
    return len(os.listdir("/proc/self/fd"))


def refuse_a_thread(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """The next thread whose name begins so cannot be started; its name is in the list from then on."""
    start, refused = threading.Thread.start, list[str]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(name) and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return refused
