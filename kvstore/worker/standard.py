"""The standard services beside ours: health and reflection. Imported only by a worker, from the ``server`` extra."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

import grpc

from kvstore.errors import KVStoreError, PermissionDenied
from kvstore.security.guard import Guard
from kvstore.wire.limits import CONTROL, SERVICE
from kvstore.wire.statuses import Busy, refusal
from kvstore.wire.watch import Watch
from kvstore.worker.call import peer_of, presented_by, request_of

HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection."
STRANGERS_MAX = 16
WATCHES_MAX = STRANGERS_MAX // 2
"""Maximum of health watches, which last: single checks must still find room."""
_MISSING = "a worker needs gRPC's health and reflection packages: pip install 'kvstore-llm[server]'"


class Health:
    """The worker's answer of the health service. Raises ModuleNotFoundError if the extra is missing."""

    def __init__(self) -> None:
        self._health = _imported("grpc_health.v1.health")
        self._statuses = _imported("grpc_health.v1.health_pb2").HealthCheckResponse
        self._servicer = self._health.HealthServicer()
        self.is_serving = False
        self.set(False)

    def set(self, serving: bool) -> None:
        """Sets SERVING or NOT_SERVING, for the worker as a whole and for the store's service."""
        self.is_serving = serving
        for service in ("", SERVICE):
            self._servicer.set(service, self._statuses.SERVING if serving else self._statuses.NOT_SERVING)

    def add_to(self, server: grpc.Server) -> None:
        """Serves health and reflection."""
        reflection = _imported("grpc_reflection.v1alpha.reflection")
        known = _KnownServices(self._servicer, self._statuses)
        _imported("grpc_health.v1.health_pb2_grpc").add_HealthServicer_to_server(known, server)
        reflection.enable_server_reflection(
            (SERVICE, CONTROL, self._health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )


class _KnownServices:
    """A health servicer that only watches existing services.

    The original remembers for ever each name that anybody watched, and strangers may send names of megabytes.
    """

    def __init__(self, servicer: Any, statuses: Any) -> None:
        self._servicer = servicer
        self._statuses = statuses

    def __getattr__(self, name: str) -> Any:
        """Passes on the other calls, which remember nothing; some versions have more of them."""
        return getattr(self._servicer, name)

    def Watch(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """Answers once for an unknown service: there will never be one of that name."""
        if request.service not in ("", SERVICE):
            return iter([self._statuses(status=self._statuses.SERVICE_UNKNOWN)])
        watched: Iterator[Any] = self._servicer.Watch(request, context)
        return watched


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(_MISSING) from missing


class Door:
    """Authenticates callers of services that are not ours, or before ours begin.

    The health service is open to all (rule X4), but only to a few strangers at once: each call keeps a thread, and a
    watch keeps it for as long as it likes.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._asking = threading.BoundedSemaphore(STRANGERS_MAX - WATCHES_MAX)
        self._watching = threading.BoundedSemaphore(WATCHES_MAX)

    def knock(self, method: str, context: grpc.ServicerContext) -> None:
        """Returns if the caller may come in, to be authorised inside; aborts the call otherwise."""
        service, _, name = method.removeprefix("/").rpartition("/")
        if self._guard.lets_all_in:
            return
        if service == HEALTH:
            self._admit_to_health(name, context)
            return
        try:
            if service in (SERVICE, CONTROL):
                # Authorisation follows where the tenant is known; authentication comes before anybody waits for the
                # caller.
                method = name if service == SERVICE else f"Control.{name}"
                self._guard.identify(method, presented_by(context), peer_of(context), request_of(context))
            else:
                method = "Reflection" if service.startswith(REFLECTION) else f"{service}/{name}"
                self._guard.admit(method, presented_by(context), peer_of(context), request_of(context))
        except PermissionDenied as error:
            _abort(context, error)

    def _admit_to_health(self, name: str, context: grpc.ServicerContext) -> None:
        if self._guard.knows(presented_by(context)):
            return
        strangers = self._watching if name == "Watch" else self._asking
        if not strangers.acquire(blocking=False):
            _abort(context, Busy("too many health checks without a token are in progress: back off, or show a token"))
        if not context.add_callback(strangers.release):
            strangers.release()  # the call has already ended


def _abort(context: grpc.ServicerContext, error: KVStoreError) -> NoReturn:
    refused = refusal(error)
    context.set_trailing_metadata(refused.trailers)
    context.abort(refused.code, refused.message)
    raise AssertionError("abort raises")


class Patience(grpc.ServerInterceptor):
    """Bounds how long a peer may keep a thread without sending what it announced.

    gRPC waits in a thread of the pool for the message of a call that has only one, before any handler is asked, and for
    as long as the peer keeps its connection. So such calls are taken as streams, whose one message is waited for under
    watch. Streams of reflection, on which a peer need never send anything, end after a time. ``door`` authenticates a
    peer before anybody waits for it.
    """

    def __init__(self, watch: Watch, most_s: float, door: Door) -> None:
        self._watch = watch
        self._most_s = most_s
        self._door = door

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        handler = continuation(details)
        if handler is None:
            return None
        serializers = (handler.request_deserializer, handler.response_serializer)
        if not handler.request_streaming and not handler.response_streaming:
            return grpc.stream_unary_rpc_method_handler(
                partial(self._one_to_one, handler.unary_unary, details.method), *serializers
            )
        if not handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                partial(self._one_to_many, handler.unary_stream, details.method), *serializers
            )
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                partial(self._bounded, handler.stream_stream, details.method), *serializers
            )
        return handler  # our own handlers watch their streams themselves

    def _one_to_one(
        self, answer: Callable[..., Any], method: str, messages: Iterator[Any], context: grpc.ServicerContext
    ) -> Any:
        self._door.knock(method, context)
        return answer(self._first(messages, context), context)

    def _one_to_many(
        self, answer: Callable[..., Any], method: str, messages: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        self._door.knock(method, context)
        yield from answer(self._first(messages, context), context)

    def _bounded(
        self, answer: Callable[..., Any], method: str, messages: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        self._door.knock(method, context)
        with self._watch.begin(self._most_s, self._most_s, context.cancel):
            yield from answer(messages, context)

    def _first(self, messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
        with self._watch.begin(self._most_s, self._most_s, context.cancel):
            message = next(messages, None)
        if message is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message: expected one")
        return message
