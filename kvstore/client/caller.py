"""Sends one call: to the best worker, and to the next one where that fails without harm. The rim of the client."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import grpc

from kvstore import tracing
from kvstore.client.bulk.links import BulkRefused, NoAnswer
from kvstore.client.endpoint import Endpoint
from kvstore.client.endpoints import Endpoints
from kvstore.counts import ClientCount, Counts
from kvstore.errors import HoldBroken, KVStoreError, Unavailable
from kvstore.sources import Clock
from kvstore.wire.bulk.channel import LinkLate
from kvstore.wire.statuses import Busy, Draining, Failure, failure

T = TypeVar("T")


class CallFailed(Exception):
    """A call to one worker failed; carries what that means."""

    def __init__(self, failed: Failure) -> None:
        super().__init__(str(failed.error))
        self.failed = failed


class Caller:
    """Sends calls to workers. Thread-safe."""

    def __init__(self, endpoints: Endpoints, counters: Counts[ClientCount], clock: Clock) -> None:
        self._endpoints = endpoints
        self._counters = counters
        self._clock = clock

    def unary(
        self,
        name: str,
        request: bytes,
        timeout_s: float,
        affinity: bytes | None = None,
        *,
        may_repeat: bool = True,
        even_aside: bool = False,
    ) -> bytes:
        """The answer to a call with one message each way. Raises what the worker raised, or Unavailable."""

        def send(endpoint: Endpoint, left_s: float) -> bytes:
            answer: bytes = endpoint.unary(name)(request, timeout=left_s)
            return answer

        return self.anywhere(send, timeout_s, affinity, may_repeat=may_repeat, even_aside=even_aside)

    def every_message(self, name: str, request: bytes, timeout_s: float) -> list[bytes]:
        """All messages of an answer that is a short stream."""

        def send(endpoint: Endpoint, left_s: float) -> list[bytes]:
            return list(endpoint.stream_in(name)(request, timeout=left_s))

        return self.anywhere(send, timeout_s, None, even_aside=True)

    def anywhere(
        self,
        send: Callable[[Endpoint, float], T],
        timeout_s: float,
        affinity: bytes | None,
        *,
        may_repeat: bool = True,
        even_aside: bool = False,
    ) -> T:
        """``send(endpoint, seconds left)`` at one worker after the other, until one answers or time is up.

        A call that must not run twice (``may_repeat`` False) goes on only where nothing at all was done.
        All attempts carry one request id, which is noted on what is raised.
        """
        with tracing.request() as id:
            try:
                return self._anywhere(send, timeout_s, affinity, may_repeat, even_aside)
            except KVStoreError as error:
                error.add_note(f"kvstore request {id}: workers' logs name it")
                raise

    def _anywhere(
        self,
        send: Callable[[Endpoint, float], T],
        timeout_s: float,
        affinity: bytes | None,
        may_repeat: bool,
        even_aside: bool,
    ) -> T:
        ends_s = self._clock.monotonic_s() + timeout_s
        error: KVStoreError | None = None
        for endpoint in self._endpoints.ranked(affinity, even_aside=even_aside):
            left_s = ends_s - self._clock.monotonic_s()
            if left_s <= 0:
                break
            if error is not None:
                self._counters.add(ClientCount.RETRIES)
            try:
                return self.at(endpoint, partial(send, endpoint, left_s))
            except CallFailed as failed:
                error = failed.failed.error
                if not (_helps_elsewhere(failed.failed) and (may_repeat or failed.failed.unsent)):
                    break
        raise error or Unavailable(f"no worker answered within {timeout_s:g} s: retry later")

    def each(self, name: str, request: bytes, timeout_s: float) -> dict[str, bytes | KVStoreError]:
        """The same question to every worker, all at once: what each answered by address, or why it did not."""
        asked: list[tuple[Endpoint, Any]] = []
        answers: dict[str, bytes | KVStoreError] = {}
        for endpoint in self._endpoints.every():
            endpoint.use()
            try:
                asked.append((endpoint, endpoint.unary(name).future(request, timeout=timeout_s)))
            except ValueError:
                endpoint.leave()  # its channel was closed meanwhile
        for endpoint, answer in asked:
            try:
                answers[endpoint.address] = self.at(endpoint, answer.result)
            except CallFailed as failed:
                answers[endpoint.address] = failed.failed.error
            finally:
                endpoint.leave()
        return answers

    def at(self, endpoint: Endpoint, send: Callable[[], T]) -> T:
        """One call to one worker, which is set aside where it did not answer. Raises CallFailed; InvalidRequest in a
        forked child.
        """
        self._endpoints.owner.check()
        try:
            with endpoint.calling(), tracing.request(), tracing.span("kvstore.attempt", worker=endpoint.address):
                return send()
        except grpc.RpcError as error:
            failed = _failure_of(error, endpoint.address)
        except BulkRefused as refused:
            failed = refused.failed
        except NoAnswer as gone:
            failed = Failure(gone, False, True)
        except LinkLate as late:
            failed = Failure(Unavailable(f"worker {endpoint.address}: {late}"), False, False)
        except grpc.FutureCancelledError:
            failed = Failure(Unavailable(f"worker {endpoint.address} took nothing for too long"), False, False)
        except ValueError as error:
            if isinstance(error, KVStoreError):
                raise
            # What gRPC says of a closed channel.
            failed = Failure(Unavailable(f"the connection to worker {endpoint.address} was closed"), False, True)
        if isinstance(failed.error, Draining) or not (failed.answered or isinstance(failed.error, Busy)):
            self._endpoints.set_aside(endpoint, str(failed.error))
        raise CallFailed(failed)


def _helps_elsewhere(failed: Failure) -> bool:
    """Whether another worker may do better: not for a request that is wrong, nor for a root that is full."""
    kind = type(failed.error)
    return issubclass(kind, (Unavailable, Busy)) and not issubclass(kind, HoldBroken)


def _failure_of(error: grpc.RpcError, address: str) -> Failure:
    """What an error of gRPC means. ``code`` and the others are there on every error that a call raises."""
    trailers: Any = error.trailing_metadata() or ()
    return failure(error.code(), error.details() or "", trailers, address)
