"""A process that forks while it serves and calls: its calls go on, and the child is refused before it takes a lock."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest

from kvstore import aio
from kvstore.census.selection import Selection
from kvstore.client.cache import Cache
from kvstore.errors import InvalidRequest
from tests.kit.cases import for_each
from tests.kit.programs import ended
from tests.kit.stores import SMALL, kv_of
from tests.kit.wire import KV, TOKENS
from tests.kit.workers import WAIT_S, Several, connected, serving

FORKS = 20
_PARENT = """
import os, sys
import kvstore
from kvstore.errors import InvalidRequest

def connects():
    try:
        with kvstore.connect(sys.argv[1]) as store:
            store.namespaces()
        return 1
    except InvalidRequest as error:
        return 2 if "spawn" in str(error) else 3

def forked():
    child = os.fork()
    if not child:
        os._exit(connects())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

codes = [forked()]
with kvstore.connect(sys.argv[1]) as store:
    store.namespaces()
    codes += [forked(), connects()]
codes.append(forked())
print(codes)
"""


def exit_code(child: int) -> int | None:
    """Returns a child's exit code; None if it did not end, and was killed."""
    limit_s = time.monotonic() + WAIT_S
    while time.monotonic() < limit_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def forked(work: Callable[[], int]) -> int | None:
    """Returns the result of ``work`` in a forked child; 99 if it raised."""
    child = os.fork()
    if not child:
        try:
            os._exit(work())
        finally:
            os._exit(99)
    return exit_code(child)


def refused_count(calls: list[Callable[[], object]]) -> int:
    """Counts the calls whose error says what to do in a child."""
    refused = 0
    for call in calls:
        try:
            call()
        except InvalidRequest as error:
            refused += "connect in the child" in str(error)
    return refused


def test_calls_of_a_process_go_on_while_it_forks_and_no_child_hangs(capfd: pytest.CaptureFixture[str]) -> None:
    """gRPC's own fork handlers log, abort or hang some children; and other threads have locks of the store."""
    with serving() as served, connected(served, bulk="grpc") as store:
        busy = store.namespace("m", SMALL)

        def work(number: int, turn: int) -> None:
            tokens = TOKENS + 1000 * number + turn % 10
            assert busy.put(tokens, kv_of(SMALL, tokens)).tokens_present == len(tokens)
            assert busy.get(tokens)[0] == len(tokens)

        calls = Several(4, work)
        codes = [forked(lambda: refused_count([lambda: busy.match(TOKENS)])) for _ in range(FORKS)]
        calls.stop()
    assert codes == [1] * FORKS
    assert "fork" not in capfd.readouterr().err


@for_each("bulk", ["shared", "grpc"])
def test_every_call_of_a_forked_child_is_refused(bulk: str) -> None:
    with serving() as served, connected(served, bulk=bulk) as store:
        cache: Cache = store.namespace("m", SMALL)
        cache.put(TOKENS, KV)
        with cache.hold(TOKENS) as hold:
            twin = aio.Cache(cache, aio.Threads())
            assert asyncio.run(twin.match(TOKENS)) == len(TOKENS)
            operation = store.clear(Selection(tenant=""), dry_run=True)
            calls: list[Callable[[], object]] = [
                lambda: cache.match(TOKENS),
                lambda: cache.get(TOKENS),
                lambda: cache.put(TOKENS, KV),
                lambda: cache.hold(TOKENS),
                lambda: cache.prefetch(TOKENS),
                lambda: cache.evict_first(TOKENS),
                store.operations,
                lambda: operation.wait(0),
                lambda: cache.blocks.match([bytes(16)]),
                lambda: hold.read_into(np.zeros_like(KV)),
                hold.view,
                lambda: next(hold.layers()),
                store.stats,
                store.pins,
                store.namespaces,
                lambda: store.namespace("n", SMALL),
                store.stats_each,
                lambda: asyncio.run(twin.match(TOKENS)),
            ]

            def in_child() -> int:
                refused = refused_count(calls)
                hold.release()
                asyncio.run(aio.Store(store, twin._threads).close())
                return refused

            assert forked(in_child) == len(calls)
            assert hold.read_into(np.zeros_like(KV)) == len(TOKENS), "the hold is the parent's"


def test_a_child_that_was_forked_after_its_parent_connected_is_refused_a_connection() -> None:
    """gRPC's threads are not in it: its calls there would wait for ever, past their deadlines."""
    env = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    with serving() as served:
        parent = ended(sys.executable, "-c", _PARENT, served.address, check=True, env=env)
    assert parent.stdout.split("\n")[0] == "[1, 2, 1, 2]", "before, beside and after the parent's connection"
