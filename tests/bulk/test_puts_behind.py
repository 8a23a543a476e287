"""Puts that are written behind: acknowledged first, and written even if that takes too long."""

from __future__ import annotations

import threading

import pytest

from kvstore.address import Address
from kvstore.sources import RandomIds
from kvstore.worker import puts_behind
from kvstore.worker.admission import Gate
from kvstore.worker.calls import Calls
from kvstore.worker.puts_behind import PutsBehind
from tests.kit.workers import WAIT_S

ADDRESSES = [Address(bytes([number]) * 16) for number in range(3)]


@pytest.fixture
def writing() -> PutsBehind:
    return PutsBehind(Calls(Gate(1), RandomIds()))


def test_writing_begins_once_the_put_was_acknowledged(writing: PutsBehind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puts_behind, "ACKNOWLEDGE_S", WAIT_S)
    acknowledged, seen = threading.Event(), list[bool]()
    writing.submit(ADDRESSES, lambda: seen.append(acknowledged.is_set()), acknowledged)
    assert writing.chunks_count == len(ADDRESSES), "whoever asks for them waits from now on"
    acknowledged.set()
    assert writing.wait_empty(WAIT_S)
    assert seen == [True]
    writing.close(WAIT_S)


def test_a_client_that_takes_no_answer_does_not_hold_up_what_it_put(
    writing: PutsBehind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puts_behind, "ACKNOWLEDGE_S", 0.001)
    written = threading.Event()
    writing.submit(ADDRESSES, written.set, threading.Event())
    assert written.wait(WAIT_S)
    writing.close(WAIT_S)
    assert not writing.chunks_count
