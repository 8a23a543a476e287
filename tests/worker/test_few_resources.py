"""Steps that fail because the process is short of memory, threads or files: nothing is lost by them."""

from __future__ import annotations

import errno
import os
import socket
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.core.clock import RandomIds
from kvstore.tiers.memory import MemoryTier
from kvstore.worker import data_put
from kvstore.worker.context import Calls, Gate
from kvstore.worker.data_get import Leases
from kvstore.worker.data_put import ReleaseLedger
from kvstore.worker.data_server import BulkListener, BulkRequests, Stranger
from kvstore.worker.limits import WorkerLimits
from tests.kit.patience import NEVER_S, PATIENCE_S, eventually


def fails(*_: object) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_a_ledger_that_cannot_be_mapped_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    made, memfd_create = list[int](), os.memfd_create

    def make(*given: Any) -> int:
        made.append(memfd_create(*given))
        return made[-1]

    monkeypatch.setattr(os, "memfd_create", make)
    monkeypatch.setattr(data_put, "mmap", SimpleNamespace(mmap=fails))
    with pytest.raises(OSError, match="memory"):
        ReleaseLedger()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(made[0])


def test_no_lease_begins_without_a_thread_that_watches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    leases = Leases(cast(MemoryTier, None))

    def refuses(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", refuses)
        assert leases.begin() is None and not len(leases)
    early, late = leases.begin(), leases.begin()
    assert early is not None and late is not None and len(leases) == 2
    client = os.dup(late.handed)
    early.handed_over()  # its client is gone before it is kept
    for each in (early, late):
        leases.keep(each)
    eventually(lambda: len(leases) == 1)
    os.close(client)
    eventually(lambda: not len(leases))
    leases.close(PATIENCE_S)


def test_a_stranger_that_was_turned_away_is_greeted_no_more() -> None:
    limits = WorkerLimits()
    listener = BulkListener(
        cast(BulkRequests, SimpleNamespace(close=lambda _: None)), Calls(Gate(1), RandomIds()), limits, None
    )
    ours, theirs = socket.socketpair()
    with theirs:
        stranger = Stranger(ours, NEVER_S)
        listener._strangers.append(stranger)
        listener._selector.register(ours, 1, stranger)
        listener._turn_away(stranger)
        listener._greet(stranger)
    listener.close(PATIENCE_S)
