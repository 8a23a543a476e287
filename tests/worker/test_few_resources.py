"""Steps that fail because the process is short of memory, threads or files: nothing is lost by them."""

from __future__ import annotations

import errno
import os
import socket
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from kvstore.core.clock import RandomIds, SystemClock
from kvstore.core.executor import Deadline, Executor, within
from kvstore.errors import Overloaded
from kvstore.worker import data_put
from kvstore.worker.context import Calls, Gate
from kvstore.worker.data_get import Leases
from kvstore.worker.data_put import ReleaseLedger
from kvstore.worker.data_server import BulkListener, Stranger
from kvstore.worker.limits import WorkerLimits
from tests.kit.descriptors import open_before, open_now, refuse_a_thread
from tests.kit.patience import NEVER_S, PATIENCE_S, eventually

NOTHING: Any = Mock()


def test_a_ledger_that_cannot_be_mapped_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_put, "mmap", SimpleNamespace(mmap=Mock(side_effect=OSError(errno.ENOMEM, "memory"))))
    before = open_before()
    with pytest.raises(OSError, match="memory"):
        ReleaseLedger()
    assert open_now() <= before


def test_no_lease_begins_without_a_thread_that_watches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    leases = Leases(NOTHING)
    assert not refuse_a_thread(monkeypatch, "")
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


def test_an_executor_has_the_threads_that_there_are_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_a_thread(monkeypatch, "kvstore-io-1")
    executor = Executor(3, 3, 1, NEVER_S, SystemClock())
    assert executor.run(threading.active_count, Deadline(SystemClock(), PATIENCE_S)) and not executor.stalled
    executor.close()
    refuse_a_thread(monkeypatch, "kvstore-io-0")
    with pytest.raises(Overloaded):
        Executor(3, 3, 1, NEVER_S, SystemClock())


def test_what_a_thread_was_to_end_in_time_has_not_ended_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not refuse_a_thread(monkeypatch, "kvstore-close") and not within(PATIENCE_S, open_now)


def test_a_stranger_that_was_turned_away_is_greeted_no_more() -> None:
    listener = BulkListener(NOTHING, Calls(Gate(1), RandomIds()), WorkerLimits(), None)
    ours, theirs = socket.socketpair()
    with theirs:
        stranger = Stranger(ours, NEVER_S)
        listener._strangers.append(stranger)
        listener._selector.register(ours, 1, stranger)
        listener._turn_away(stranger)
        listener._greet(stranger)
    listener.close(PATIENCE_S)
