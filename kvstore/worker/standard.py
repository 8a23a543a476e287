"""The standard services beside ours: health and reflection. Imported only by a worker, from the ``server`` extra."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


class ReflectionBound(grpc.ServerInterceptor):
    """Ends streams of reflection after a time: one on which nothing is sent would keep a thread for ever."""

    def __init__(self, watch: Watch, most_s: float) -> None:
        self._watch = watch
        self._most_s = most_s

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        handler = continuation(details)
        if handler is None or not (handler.request_streaming and handler.response_streaming):
            return handler
        answer = handler.stream_stream

        def bounded(messages: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            with self._watch.begin(self._most_s, self._most_s, context.cancel):
                yield from answer(messages, context)

        return grpc.stream_stream_rpc_method_handler(bounded, handler.request_deserializer, handler.response_serializer)
