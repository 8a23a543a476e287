"""The standard services beside ours: health and reflection. Imported only by a worker, from the ``server`` extra."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import grpc

from kvstore.wire.limits import SERVICE
from kvstore.wire.watch import Watch

_MISSING = "a worker needs gRPC's health and reflection packages: pip install 'kvstore[server]'"


class Health:
    """What the health service says of the worker. Raises ModuleNotFoundError where the extra is missing."""

    def __init__(self) -> None:
        self._health = _imported("grpc_health.v1.health")
        self._statuses = _imported("grpc_health.v1.health_pb2").HealthCheckResponse
        self._servicer = self._health.HealthServicer()
        self.is_serving = False
        self.set(False)

    def set(self, serving: bool) -> None:
        """Says SERVING or NOT_SERVING, of the worker as a whole and of the store's service."""
        self.is_serving = serving
        for service in ("", SERVICE):
            self._servicer.set(service, self._statuses.SERVING if serving else self._statuses.NOT_SERVING)

    def add_to(self, server: grpc.Server) -> None:
        """Serves health and reflection."""
        reflection = _imported("grpc_reflection.v1alpha.reflection")
        _imported("grpc_health.v1.health_pb2_grpc").add_HealthServicer_to_server(self._servicer, server)
        reflection.enable_server_reflection((SERVICE, self._health.SERVICE_NAME, reflection.SERVICE_NAME), server)


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(_MISSING) from missing


class Patience(grpc.ServerInterceptor):
    """Bounds how long a peer may keep a thread without sending what it announced.

    gRPC waits in a thread of the pool for the message of a call that has only one, before any handler is asked, and for
    as long as the peer keeps its connection.  So such calls are taken as streams, whose one message is waited for under
    watch; and streams of reflection, on which a peer need never send anything, end after a time.
    """

    def __init__(self, watch: Watch, most_s: float) -> None:
        self._watch = watch
        self._most_s = most_s

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        handler = continuation(details)
        if handler is None:
            return None
        serializers = (handler.request_deserializer, handler.response_serializer)
        if not handler.request_streaming and not handler.response_streaming:
            return grpc.stream_unary_rpc_method_handler(partial(self._one_to_one, handler.unary_unary), *serializers)
        if not handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(partial(self._one_to_many, handler.unary_stream), *serializers)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(partial(self._bounded, handler.stream_stream), *serializers)
        return handler  # ours, which watch over themselves

    def _one_to_one(self, answer: Callable[..., Any], messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
        return answer(self._first(messages, context), context)

    def _one_to_many(
        self, answer: Callable[..., Any], messages: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        yield from answer(self._first(messages, context), context)

    def _bounded(
        self, answer: Callable[..., Any], messages: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        with self._watch.begin(self._most_s, self._most_s, context.cancel):
            yield from answer(messages, context)

    def _first(self, messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
        with self._watch.begin(self._most_s, self._most_s, context.cancel):
            message = next(messages, None)
        if message is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message: expected one")
        return message
