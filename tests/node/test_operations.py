"""The operations of one process: their states, limits and turns, without a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvstore.core.clock import RandomIds, SystemClock
from kvstore.core.operations import FINISHED_MAX, KIND_THREADS, Cancelled, OperationRun, Operations, OperationState
from kvstore.errors import Overloaded, Unavailable
from tests.kit.cases import for_each
from tests.kit.patience import PATIENCE_S
from tests.kit.tiers import eventually

Work = Callable[[OperationRun], str]


@contextmanager
def operating(unfinished_max: int = 32) -> Iterator[Operations]:
    operations = Operations(SystemClock(), RandomIds(), lambda: unfinished_max)
    try:
        yield operations
    finally:
        operations.close(PATIENCE_S)


def endless(run: OperationRun) -> str:
    while True:
        run.pause(PATIENCE_S)


def ended(run: OperationRun) -> OperationState:
    status = run.poll(PATIENCE_S)
    assert status.state.ended
    return status.state


def test_cancelled_while_waiting_never_runs() -> None:
    with operating() as operations:
        busy = [operations.begin("clear", endless) for _ in range(KIND_THREADS)]
        eventually(lambda: operations.count(OperationState.RUNNING) == KIND_THREADS)
        ran = threading.Event()

        def work(run: OperationRun) -> str:
            ran.set()
            return ""

        waiting = operations.begin("clear", work)
        assert waiting.cancel("enough").state is OperationState.CANCELLED
        for run in busy:
            run.cancel()
        assert [ended(run) for run in busy] == KIND_THREADS * [OperationState.CANCELLED]
        assert ended(operations.begin("clear", lambda run: "")) is OperationState.DONE
    assert not ran.is_set() and waiting.status.message == "enough"


@for_each(
    "error, expected, message",
    [
        (Unavailable("etcd is away"), OperationState.FAILED, "etcd is away"),
        (Cancelled("enough"), OperationState.CANCELLED, "enough"),
        (RuntimeError("secret path"), OperationState.FAILED, "in the log"),
    ],
)
def test_error_of_the_work_ends_it_and_no_thread(error: Exception, expected: OperationState, message: str) -> None:
    def work(run: OperationRun) -> str:
        raise error

    with operating() as operations:
        run = operations.begin("clear", work)
        assert ended(run) is expected
        assert ended(operations.begin("clear", lambda run: "")) is OperationState.DONE
    assert message in run.status.message and "secret" not in run.status.message


def test_full_kind_leaves_threads_to_another() -> None:
    with operating() as operations:
        for _ in range(KIND_THREADS + 2):
            operations.begin("prefetch", endless)
        eventually(lambda: operations.count(OperationState.RUNNING) == KIND_THREADS)
        assert ended(operations.begin("clear", lambda run: "")) is OperationState.DONE
        assert operations.count(OperationState.WAITING) == 2


def test_tenant_with_fewer_running_takes_the_next_turn() -> None:
    began: list[str] = []

    def begin(tenant: str, work: Work = endless) -> OperationRun:
        def run(run: OperationRun) -> str:
            began.append(tenant)
            return work(run)

        return operations.begin("prefetch", run, tenant=tenant)

    with operating() as operations:
        busy = [begin("acme") for _ in range(KIND_THREADS)]
        eventually(lambda: len(began) == KIND_THREADS)
        begin("acme")
        other = begin("beta", lambda run: "")
        busy[0].cancel()
        assert ended(other) is OperationState.DONE
        assert began[KIND_THREADS] == "beta"


def test_tenant_at_its_share_leaves_places_to_others() -> None:
    with operating(unfinished_max=4) as operations:
        for _ in range(2):
            operations.begin("prefetch", endless, tenant="acme", tenant_share=0.5)
        with pytest.raises(Overloaded, match="2 operations of tenant 'acme'"):
            operations.begin("prefetch", endless, tenant="acme", tenant_share=0.5)
        operations.begin("prefetch", endless, tenant="beta", tenant_share=0.5)
        operations.begin("clear", endless, tenant_share=0.5)


def test_finished_beyond_the_limit_are_forgotten_oldest_first() -> None:
    with operating() as operations:
        running = operations.begin("prefetch", endless)
        runs = []
        for _ in range(FINISHED_MAX + 5):
            runs.append(operations.begin("clear", lambda run: ""))
            assert ended(runs[-1]) is OperationState.DONE
        last = operations.begin("clear", lambda run: "")
        kept = operations.every()
        assert len(kept) == FINISHED_MAX + 2 and kept[0] is last
        assert operations.find(running.status.id) is running
        assert operations.find(runs[0].status.id) is None
