"""Operations as their caller sees them: one class for those of this process and those of a worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from kvstore.core.executor import Owner
from kvstore.core.operations import NoOperation, OperationState, OperationStatus
from kvstore.core.validate import checked_timeout

STEP_S = 5.0
"""Longest single wait for the end."""


class OperationSource(Protocol):
    """The operation itself: ``OperationRun`` in this process, ``RemoteRun`` at a worker."""

    status: OperationStatus
    """The status as last seen."""

    def poll(self, wait_s: float = 0.0) -> OperationStatus:
        """Returns the status once the operation has ended, or after ``wait_s``."""
        ...

    def cancel(self) -> OperationStatus:
        """Cancels it; idempotent. Returns the status."""
        ...


class Operation:
    """A long-running operation: a prefetch, a clear or a check. Thread-safe.

    It runs whether or not a caller waits for it; an operation of a worker continues when its client ends. A worker that
    drains or stops cancels its operations, and so does a store of this process that is closed.

    ``state``, ``done``, ``total``, ``message`` and ``counts`` are current. At a worker they cost a short call, which
    raises Unavailable if the worker does not answer.

    Examples
    --------
    >>> operation = cache.prefetch(tokens)
    >>> if operation.wait(timeout=60):
    ...     print(operation.done, "of", operation.total, "tokens")
    96 of 96 tokens
    """

    def __init__(self, source: OperationSource) -> None:
        self._owner = Owner()
        self._source = source
        self._last = source.status

    def __repr__(self) -> str:
        last = self._last
        return f"<kvstore.Operation {last.id} {last.kind} {last.state.value}, {last.done} of {last.total} {last.unit}>"

    @property
    def last(self) -> OperationStatus:
        """The status as last seen; makes no call.

        Examples
        --------
        >>> cache.prefetch(tokens).last.unit
        'tokens'
        """
        return self._last

    @property
    def id(self) -> str:
        """The id for ``kvstore ops cancel``.

        Examples
        --------
        >>> operation = cache.prefetch(tokens)
        >>> operation.id in [each.id for each in store.operations()]
        True
        """
        return self._last.id

    @property
    def state(self) -> OperationState:
        """The state: "waiting", "running", "done", "failed" or "cancelled".

        Examples
        --------
        >>> operation = cache.prefetch(tokens)
        >>> operation.wait(), operation.state == "done"
        (True, True)
        """
        return self._poll(0.0).state

    @property
    def done(self) -> int:
        """Tokens prefetched, or shards visited; at the end less than ``total`` if a part failed (``message``).

        Examples
        --------
        >>> operation = cache.prefetch(tokens)
        >>> operation.wait(), operation.done
        (True, 96)
        """
        return self._poll(0.0).done

    @property
    def total(self) -> int:
        """Tokens stored, or shards of the root; 0 while unknown.

        Examples
        --------
        >>> operation = cache.prefetch(tokens)
        >>> operation.wait(), operation.total
        (True, 96)
        """
        return self._poll(0.0).total

    @property
    def message(self) -> str:
        """The reason why it failed, was cancelled, or did a part only; else empty.

        Examples
        --------
        >>> operation = cache.prefetch(tokens)
        >>> operation.wait(), operation.message
        (True, '')
        """
        return self._poll(0.0).message

    @property
    def counts(self) -> Mapping[str, int]:
        """The results so far by name, such as the chunks and bytes that a clear has deleted.

        Examples
        --------
        >>> operation = store.clear(kvstore.Selection(namespace=cache.namespace.digest))
        >>> operation.wait(), operation.counts["chunks"]
        (True, 6)
        """
        return self._poll(0.0).counts

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it has ended, at most ``timeout`` seconds; returns True if it has.

        A wait that times out ends nothing, and a failed operation does not raise. Raises Unavailable if the worker does
        not answer, InvalidRequest in a forked child.

        Examples
        --------
        >>> cache.prefetch(tokens).wait(timeout=60)
        True
        """
        seconds = checked_timeout(timeout)
        ends_s = float("inf") if seconds is None else time.monotonic() + seconds
        while True:
            left_s = max(0.0, ends_s - time.monotonic())
            if self._poll(min(left_s, STEP_S)).state.ended:
                return True
            if time.monotonic() >= ends_s:
                return False

    def cancel(self) -> None:
        """Cancels it; what is done stays. Idempotent; does not wait for the end. Does nothing in a forked child.

        Raises Unavailable if the worker does not answer.

        Examples
        --------
        >>> operation = cache.prefetch(tokens)
        >>> operation.cancel()
        >>> operation.wait(timeout=60)
        True
        """
        if self._owner.is_here and not self._last.state.ended:
            self._update(self._source.cancel)

    def _poll(self, wait_s: float) -> OperationStatus:
        self._owner.check()
        if not self._last.state.ended:
            self._update(lambda: self._source.poll(wait_s))
        return self._last

    def _update(self, call: Callable[[], OperationStatus]) -> None:
        try:
            self._last = call()
        except NoOperation as gone:
            self._last = replace(self._source.status, state=OperationState.FAILED, message=str(gone))
