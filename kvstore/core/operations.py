"""Long-running operations (prefetch, clear, fsck) as the process that runs them keeps them, and their progress.

An operation waits, runs, and ends as done, failed or cancelled. It calls its ``Progress`` about once a second, in the
thread that it was called in, passes on the exception that this may raise, and leaves things so that the same operation,
repeated, does the rest. ``kvstore.client.operation`` has what a caller sees of one, here or at a worker.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from kvstore.core.clock import Clock, Ids
from kvstore.core.executor import Decision, Loop
from kvstore.errors import InvalidRequest, KVStoreError, Overloaded, Unavailable


class Cancelled(KVStoreError):
    """This operation was asked to end. Its results so far stay. Never raised to a caller of the store."""


Progress = Callable[[int, int], None]
"""``progress(done, total)``; ``total`` is 0 while it is not known. Raises Cancelled, or Unavailable past a deadline."""


def unwatched(done: int, total: int) -> None:
    """A ``Progress`` for operations without an observer that have a deadline of their own."""


log = logging.getLogger(__name__)

UNFINISHED_MAX = 32
FINISHED_MAX = 100
"""Finished operations that are kept, the newest of them."""
KIND_THREADS = 4
"""Operations of one kind that run at a time: prefetches never delay a clear."""
THREADS_MAX = 2 * KIND_THREADS
DEADLINE_S = 86_400.0


class NoOperation(InvalidRequest):
    """No operation has this id: it ended long ago, or its worker was restarted."""


class OperationState(enum.StrEnum):
    """The state of an operation; equal to its name as a string."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """True if the state is final."""
        return self not in (OperationState.WAITING, OperationState.RUNNING)


_NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class OperationStatus:
    """An operation at one moment. Times are wall times; 0 means not yet."""

    id: str
    kind: str
    """"prefetch", "clear" or "fsck"."""
    about: str = ""
    """The prompt, selection or root that it is about, in words."""
    unit: str = ""
    """The unit of ``done`` and ``total``."""
    began_s: float = 0.0
    state: OperationState = OperationState.WAITING
    ended_s: float = 0.0
    done: int = 0
    total: int = 0
    """0 while it is unknown."""
    message: str = ""
    """The reason of a failure or cancellation, or a remark on the result."""
    counts: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    """The results so far, by name."""
    identity: str = ""
    """The identity of the client that began it; empty if unknown."""
    tenant: str | None = None
    """The tenant whose chunks it is about; None: all tenants."""
    worker: str = ""
    """The address of the worker that runs it; empty in this process."""


Work = Callable[["OperationRun"], str]
"""Does the operation; returns a remark on the result, or nothing. Raises KVStoreError if it fails."""


class OperationRun:
    """One operation in this process. Thread-safe. Made by ``Operations.begin``."""

    def __init__(
        self,
        status: OperationStatus,
        work: Work,
        ends_s: float,
        clock: Clock,
        changed: threading.Condition,
        on_end: Callable[[OperationState], None],
    ) -> None:
        self.status = status
        self._work: Work | None = work
        self._ends_s = ends_s
        self._clock = clock
        self._changed = changed
        self._on_end = on_end
        self._why = ""
        """The reason of a cancellation; empty unless it was cancelled."""

    # For callers

    def poll(self, wait_s: float = 0.0) -> OperationStatus:
        """Returns the status once the operation has ended, or after ``wait_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self.status.state.ended, wait_s)
            return self.status

    def cancel(self, why: str = "cancelled") -> OperationStatus:
        """Cancels it: immediately if it waits, else at its next step. Idempotent, never waits."""
        with self._changed:
            self._why = self._why or why
            self._changed.notify_all()
            is_ended = self.status.state is OperationState.WAITING and self._set(OperationState.CANCELLED, self._why)
        if is_ended:
            self._report()
        return self.status

    # For the work

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; 0 once it has passed."""
        return max(0.0, self._ends_s - self._clock.monotonic_s())

    def progress(self, done: int, total: int) -> None:
        """Reports progress (``kvstore.core.operations``). Raises as ``check`` does."""
        with self._changed:
            self.status = replace(self.status, done=done, total=total)
        self.check()

    def count(self, **counts: int) -> None:
        """Sets results so far, as totals."""
        with self._changed:
            self.status = replace(self.status, counts=MappingProxyType({**self.status.counts, **counts}))

    def check(self) -> None:
        """Raises Cancelled once it is cancelled, Unavailable past the deadline."""
        if self._why:
            raise Cancelled(self._why)
        if not self.left_s:
            raise Unavailable(f"{self.status.kind} was not done in time; what was done stays: begin it again")

    def pause(self, seconds: float) -> None:
        """Waits, unless it is cancelled. Raises as ``check`` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._why, min(seconds, self.left_s))
        self.check()

    # For the registry

    def run(self) -> None:
        """Does the work. No exception of it ends the thread."""
        work = self._work
        assert work is not None, "an operation runs once"
        try:
            self.check()
            message = work(self)
        except KVStoreError as error:
            is_cancelled = bool(self._why) or isinstance(error, Cancelled)  # a store that closes fails its steps, too
            state = OperationState.CANCELLED if is_cancelled else OperationState.FAILED
            self._end(state, self._why or str(error))
        except Exception:
            # A defect of ours. Its traceback goes to the log only: it may hold paths and tokens.
            log.exception("operation.failed id=%s", self.status.id)
            self._end(OperationState.FAILED, f"internal error: look for operation {self.status.id} in the log")
        else:
            self._end(OperationState.DONE, message)

    def _end(self, state: OperationState, message: str) -> None:
        with self._changed:
            is_ended = self._set(state, message)
        if is_ended:
            self._report()

    def _set(self, state: OperationState, message: str) -> bool:
        """Sets the final state; False if it has one already. Called under the lock."""
        if self.status.state.ended:
            return False
        self.status = replace(self.status, state=state, message=message, ended_s=self._clock.now_s())
        self._work = None  # it may hold a prompt
        self._changed.notify_all()
        return True

    def _report(self) -> None:
        status = self.status
        self._on_end(status.state)
        log.info("operation.ended id=%s state=%s message=%r", status.id, status.state.value, status.message)


class Operations:
    """The operations of one process: those that have not ended, and the newest of those that have. Thread-safe."""

    def __init__(
        self,
        clock: Clock,
        ids: Ids,
        unfinished_max: Callable[[], int] = lambda: UNFINISHED_MAX,
        on_end: Callable[[OperationState], None] = lambda state: None,
    ) -> None:
        """``on_end`` is called with the final state of each."""
        self._clock = clock
        self._ids = ids
        self._unfinished_max = unfinished_max
        self._on_end = on_end
        self._changed = threading.Condition()
        self._runs: dict[str, OperationRun] = {}
        self._loop = Loop("kvstore-operation", self._changed, self._next, threads_max=THREADS_MAX)

    def begin(
        self,
        kind: str,
        work: Work,
        *,
        about: str = "",
        unit: str = "",
        identity: str = "",
        tenant: str | None = None,
        tenant_share: float = 1.0,
        deadline_s: float = DEADLINE_S,
    ) -> OperationRun:
        """Queues an operation. One tenant may have ``tenant_share`` of the unfinished ones.

        Raises Overloaded if too many are unfinished, Unavailable after ``close``.
        """
        status = OperationStatus(
            self._ids.fresh()[:8].hex(), kind, about, unit, self._clock.now_s(), identity=identity, tenant=tenant
        )
        ends_s = self._clock.monotonic_s() + deadline_s
        run = OperationRun(status, work, ends_s, self._clock, self._changed, self._on_end)
        with self._changed:
            if self._loop.closed:
                raise Unavailable("the store is closing and begins no operation: use another worker")
            self._make_room(tenant, tenant_share)
            self._start_thread()
            self._runs[status.id] = run
            self._changed.notify_all()
        log.info("operation.began id=%s kind=%s about=%r identity=%s", status.id, kind, about, identity)
        return run

    def every(self) -> list[OperationRun]:
        """Returns all operations, newest first."""
        with self._changed:
            return [*reversed(self._runs.values())]

    def find(self, id: str) -> OperationRun | None:
        """Returns the operation with this id, or None."""
        with self._changed:
            return self._runs.get(id)

    def count(self, state: OperationState) -> int:
        """Returns the number of operations in a state."""
        return sum(run.status.state is state for run in self.every())

    def close(self, timeout_s: float, why: str = "the store was closed") -> None:
        """Cancels all, begins no other, and waits at most this long for those running. Idempotent."""
        self._loop.stop()
        if self._loop.owner.is_here:
            for run in self.every():
                run.cancel(why)
        self._loop.close(timeout_s)

    def _make_room(self, tenant: str | None, tenant_share: float) -> None:
        """Forgets the oldest finished ones over the limit. Raises Overloaded if there are too many unfinished ones."""
        finished = [id for id, run in self._runs.items() if run.status.state.ended]
        for id in finished[: max(0, len(finished) - FINISHED_MAX)]:
            del self._runs[id]
        unfinished = [run for run in self._runs.values() if not run.status.state.ended]
        most = self._unfinished_max()
        if len(unfinished) >= most:
            raise Overloaded(f"{most} operations are unfinished, which is the limit; retry later")
        share = max(1, int(tenant_share * most))
        if tenant is not None and sum(run.status.tenant == tenant for run in unfinished) >= share < most:
            raise Overloaded(f"{share} operations of tenant {tenant!r} are unfinished, which is its limit; retry later")

    def _start_thread(self) -> None:
        """Starts one more thread if all may be busy. Raises Overloaded if the host has none and no other does it."""
        if len(self._loop.threads) > sum(not run.status.state.ended for run in self._runs.values()):
            return
        try:
            self._loop.start()
        except RuntimeError as cause:
            if not self._loop.threads:
                raise Overloaded("the host has no thread left for the operation; retry later") from cause

    def _next(self) -> Decision:
        """Takes the oldest one of the tenant with the fewest running, of a kind that has a thread left."""
        runs = self._runs.values()
        running = [run.status for run in runs if run.status.state is OperationState.RUNNING]
        kinds = Counter(status.kind for status in running)
        tenants = Counter(status.tenant for status in running)
        ready = [
            run for run in runs if run.status.state is OperationState.WAITING and kinds[run.status.kind] < KIND_THREADS
        ]
        if not ready:
            return None
        run = min(ready, key=lambda each: tenants[each.status.tenant])
        run.status = replace(run.status, state=OperationState.RUNNING)
        return run.run
