"""Callers of a replay in separate processes, each with its own store, like engines on one host.

They start together once all have opened their store, and die with this process.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from kvstore.errors import KVStoreError, Unavailable
from kvstore.replay.callers import OpenStore, Plan, Progress, run_threads
from kvstore.replay.content import Content, replay_layout
from kvstore.replay.lane import Lane, Tally
from kvstore.replay.trace import Request

START_S = 120.0
CLOSE_S = 10.0
"""Time for a process to close its store, once it is done."""
GIVE_UP_S = 0.5
"""Time for all processes to end by themselves, where they have no reason to go on."""
TELL_S = 0.2
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class _Served:
    """Message: ``count`` more requests are done."""

    count: int


@dataclass(frozen=True, slots=True)
class _Ready:
    """Message: the store is open."""


_Message = _Served | _Ready | Tally | KVStoreError


def run_processes(requests: Sequence[Request], open_store: OpenStore, plan: Plan, progress: Progress) -> Tally:
    """Serves ``requests`` by ``plan.processes``, each taking every n-th. Raises the first error of any of them."""
    context = multiprocessing.get_context("spawn")  # a forked child of a process with threads may deadlock
    ours: list[Connection] = []
    children: list[SpawnProcess] = []
    total = Tally()
    try:
        for number in range(plan.processes):
            mine, theirs = context.Pipe()
            child = context.Process(
                target=_child,
                args=(theirs, os.getpid(), list(requests[number :: plan.processes]), open_store, plan),
                name=f"kvstore replay {number}",
                daemon=True,
            )
            child.start()
            theirs.close()
            ours.append(mine)
            children.append(child)
        _start_together(ours)
        _collect(ours, total, progress)
        for child in children:
            child.join(timeout=CLOSE_S)  # it sent its tally, so it only has to close its store
    finally:
        _end(ours, children)  # the store may be removed next, so none may be left that writes to it
    return total


def _end(ours: list[Connection], children: list[SpawnProcess]) -> None:
    """Ends those that still run: nobody waits for them any more."""
    for each in ours:
        each.close()
    deadline_s = time.monotonic() + GIVE_UP_S
    for child in children:
        child.join(timeout=max(0.0, deadline_s - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()
        child.close()


def _start_together(children: list[Connection]) -> None:
    """Waits until all have opened their store, and starts them. Raises what one of them raised."""
    deadline_s = time.monotonic() + START_S
    for each in children:
        if not each.poll(max(0.0, deadline_s - time.monotonic())):
            raise Unavailable(f"a replaying process did not open its store within {START_S:g} s")
        _expect_ready(_receive(each))
    for each in children:
        each.send(None)


def _collect(children: list[Connection], total: Tally, progress: Progress) -> None:
    """Adds the tallies of all to ``total`` as they arrive. Raises what one of them raised."""
    running = list(children)
    while running:
        for each in _with_news(running):
            message = _receive(each)
            if isinstance(message, _Served):
                progress(message.count)
            elif isinstance(message, Tally):
                total.add(message)
                running.remove(each)
            else:
                _expect_ready(message)


def _with_news(connections: list[Connection]) -> list[Connection]:
    return [each for each in wait(connections) if isinstance(each, Connection)]


def _receive(connection: Connection) -> _Message:
    try:
        message: _Message = connection.recv()
    except (EOFError, OSError) as cause:
        raise Unavailable("a replaying process died: its messages are above") from cause
    return message


def _expect_ready(message: _Message) -> None:
    if isinstance(message, KVStoreError):
        raise message
    assert isinstance(message, _Ready)


def _child(connection: Connection, parent: int, requests: list[Request], open_store: OpenStore, plan: Plan) -> None:
    """The main program of one process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all processes; the parent ends this one
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
    served, told_s = 0, time.monotonic()

    def progress(count: int) -> None:
        nonlocal served, told_s
        served += count
        if time.monotonic() - told_s >= TELL_S:
            connection.send(_Served(served))
            served, told_s = 0, time.monotonic()

    with suppress(EOFError, ConnectionError):  # the parent gave up, perhaps before it had read all that we sent
        try:
            content = Content(replay_layout(plan.bytes_per_token), plan.seed)
            with open_store() as store:
                cache = store.namespace(plan.namespace, content.layout)
                connection.send(_Ready())
                connection.recv()
                tally = run_threads(lambda: Lane(cache, content, None), requests, plan.threads, progress)
                connection.send(_Served(served))
                connection.send(tally)
        except KVStoreError as error:
            connection.send(error)
