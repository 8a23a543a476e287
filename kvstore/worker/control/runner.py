"""Runs the operations of tickets: few threads, one queue, a deadline on each, cancelled within a second.

Separate from the book, which knows nothing of threads, and from the operations, which know nothing of tickets.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvstore.background import Decision, Loop
from kvstore.errors import KVStoreError, Overloaded, Unavailable
from kvstore.progress import Cancelled
from kvstore.sources import Clock, Ids
from kvstore.tickets import State, Ticket
from kvstore.worker.control.book import Book

log = logging.getLogger(__name__)

THREADS_MAX = 4
"""Operations at once: two that rewrite the whole root, and some prefetches beside them."""
SPARE_THREADS = 1
"""Extra threads for operations across tenants: others may take hours, and clearing a bad roll-out must start now."""
DEADLINE_S_MAX = 86_400.0


class Step:
    """An operation's view of its ticket: reports progress, says whether to go on. Used by the operation's thread."""

    def __init__(self, book: Book, ticket_id: str, clock: Clock, ends_s: float) -> None:
        self._book = book
        self._ticket_id = ticket_id
        self._clock = clock
        self._ends_s = ends_s
        self._cancelled = threading.Event()
        self._done = 0
        self._total = 0
        self._counts: dict[str, int] = {}

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; 0 once it has passed."""
        return max(0.0, self._ends_s - self._clock.monotonic_s())

    def progress(self, done: int, total: int) -> None:
        """Reports progress (``kvstore.progress``). Raises Cancelled, or Unavailable past the deadline."""
        self._done, self._total = done, total
        self._tell()
        self.check()

    def count(self, **counts: int) -> None:
        """Sets the results so far, as totals."""
        self._counts.update(counts)
        self._tell()

    def check(self) -> None:
        """Raises Cancelled, or Unavailable past the deadline."""
        if self._cancelled.is_set():
            raise Cancelled("cancelled; what was done until then stays done")
        if not self.left_s:
            raise Unavailable("the deadline passed: what was done stays done; start it again for the rest")

    def pause(self, seconds: float) -> None:
        """Waits. Raises as ``check`` does, as soon as it is cancelled."""
        self._cancelled.wait(min(seconds, self.left_s))
        self.check()

    def cancel(self) -> None:
        """Ends the operation at its next ``check``. Called by other threads."""
        self._cancelled.set()

    def _tell(self) -> None:
        self._book.advance(self._ticket_id, self._done, self._total, self._counts)


Work = Callable[[Step], str]
"""Does the operation; returns a message worth knowing, or nothing. Raises KVStoreError if it fails."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    step: Step
    ticket_id: str
    work: Work
    tenant: str | None


class Runner:
    """Runs operations. Thread-safe. Close it. ``on_end`` is told how each ticket ended; see ``SPARE_THREADS``."""

    def __init__(
        self,
        book: Book,
        clock: Clock,
        ids: Ids,
        on_end: Callable[[State], None] = lambda state: None,
        threads_max: int = THREADS_MAX,
        spare_threads: int = 0,
    ) -> None:
        self.book = book
        self._on_end = on_end
        self._clock = clock
        self._ids = ids
        self._tenants_max = threads_max
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._running: Counter[str | None] = Counter()
        """Number of running operations by tenant."""
        self._steps: dict[str, Step] = {}
        threads_max += spare_threads
        self._loop = Loop("kvstore-ticket", self._changed, self._next, threads_max=threads_max)

    def begin(
        self,
        act: str,
        work: Work,
        *,
        about: str,
        unit: str,
        identity: str = "",
        tenant: str | None = None,
        deadline_s: float = 0.0,
        tokens: int = 0,
    ) -> Ticket:
        """Queues an operation. ``deadline_s`` counts from now; 0, or more than a day, means a day.

        ``tokens`` is the size of the prompts that ``work`` keeps. Raises Overloaded if too many are not done,
        Unavailable after ``close``.
        """
        seconds = min(deadline_s or DEADLINE_S_MAX, DEADLINE_S_MAX)
        id = self._ids.fresh()[:8].hex()
        ticket = Ticket(id, act, about, identity, tenant, unit, self._clock.now_s(), tokens=tokens)
        step = Step(self.book, ticket.id, self._clock, self._clock.monotonic_s() + seconds)
        with self._changed:
            if self._loop.closed:
                raise Unavailable("the worker is draining and begins nothing any more: turn to another one")
            self.book.add(ticket)
            if len(self._loop.threads) < len(self._steps) + 1:
                self._hire(ticket.id)
            self._steps[ticket.id] = step
            self._waiting.append(_Job(step, ticket.id, work, tenant))
            self._changed.notify()
        log.info("ticket.began id=%s act=%s about=%r identity=%s", ticket.id, act, about, identity)
        return ticket

    def cancel(self, ticket_id: str, why: str = "cancelled") -> None:
        """Cancels an operation: at once if it waits, else soon. Idempotent; never waits."""
        with self._changed:
            step = self._steps.get(ticket_id)
            waiting = next((each for each in self._waiting if each.ticket_id == ticket_id), None)
            if waiting is not None:
                self._waiting.remove(waiting)
        if step is not None:
            step.cancel()
        if waiting is not None:
            self._end(ticket_id, State.CANCELLED, why)

    def close(self, timeout_s: float) -> None:
        """Cancels all, and waits at most this long for those running. Idempotent."""
        with self._changed:
            self._loop.stop()
            ids = [*self._steps]
        for ticket_id in ids:
            self.cancel(ticket_id, "the worker stopped")
        self._loop.close(timeout_s)

    def _hire(self, ticket_id: str) -> None:
        """One thread more. Raises Overloaded where the system has none, and there is nobody else to do the ticket."""
        try:
            self._loop.start()
        except RuntimeError as cause:
            if self._loop.threads:
                return
            self.book.move(ticket_id, State.CANCELLED, message="no thread for it", ended_s=self._clock.now_s())
            raise Overloaded("the worker's host has no thread left for it: back off") from cause

    def _next(self) -> Decision:
        job = self._turn()
        if job is None:
            return None
        self._waiting.remove(job)
        self._running[job.tenant] += 1
        return partial(self._run, job)

    def _run(self, job: _Job) -> None:
        self._do(job)
        with self._changed:
            self._running[job.tenant] -= 1
            if not self._running[job.tenant]:
                del self._running[job.tenant]  # names that somebody made up are not kept

    def _turn(self) -> _Job | None:
        """The first one of the tenant with fewest under way: who asks for fifty does not make others wait for them.

        None if no job may run: a busy thread takes the next one when it is done.
        """
        of_tenants = self._running.total() - self._running[None]
        turns = [each for each in self._waiting if each.tenant is None or of_tenants < self._tenants_max]
        return min(turns, key=lambda each: self._running[each.tenant], default=None)

    def _do(self, job: _Job) -> None:
        """Runs one job to its end. No exception of it ends the thread."""
        self.book.move(job.ticket_id, State.RUNNING)
        try:
            job.step.check()
            said = job.work(job.step)
        except Cancelled as cancelled:
            self._end(job.ticket_id, State.CANCELLED, str(cancelled))
        except KVStoreError as error:
            self._end(job.ticket_id, State.FAILED, str(error))
        except Exception:
            # A defect of ours. Its traceback goes to the log only: it may hold paths and tokens.
            log.exception("ticket.failed id=%s", job.ticket_id)
            self._end(job.ticket_id, State.FAILED, f"the worker failed: look for ticket {job.ticket_id} in its log")
        else:
            self._end(job.ticket_id, State.DONE, said)

    def _end(self, ticket_id: str, state: State, message: str) -> None:
        ended = self.book.move(ticket_id, state, message=message, ended_s=self._clock.now_s())
        with self._changed:
            self._steps.pop(ticket_id, None)
        if not ended:
            return
        self._on_end(state)
        log.info("ticket.ended id=%s state=%s message=%r", ticket_id, state.value, message)
