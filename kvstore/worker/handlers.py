"""gRPC handlers: messages travel as bytes; a call is admitted, watched, and its message parsed inside.

Separate from the services, because an error in any call is answered alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from kvstore.wire.messages import parse
from kvstore.wire.watch import Watch
from kvstore.worker.call import Call
from kvstore.worker.calls import Calls, UnaryCall
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.streams import arriving, leaving, watched

Request = TypeVar("Request", bound=Message)
Context = grpc.ServicerContext


class Handlers:
    """Makes handlers. ``limits`` returns the limits of a call that begins now."""

    def __init__(self, calls: Calls, watch: Watch, limits: Callable[[], WorkerLimits]) -> None:
        self._calls = calls
        self._watch = watch
        self._limits = limits

    def unary(self, name: str, served: UnaryCall[Any]) -> Any:
        """Returns the handler of a call with one message each way."""

        def serve(raw: bytes, context: Context) -> bytes:
            with self._calls.serving(name, context, light=served.light) as call:
                return served.answer(parse(served.kind, raw), call).SerializeToString()
            raise AssertionError("an error was answered already")

        return grpc.unary_unary_rpc_method_handler(serve)

    def many(self, name: str, kind: type[Request], answer: Callable[[Request, Call], Iterator[bytes]]) -> Any:
        """Returns the handler of a call that is answered by a stream."""

        def serve(raw: bytes, context: Context) -> Iterator[bytes]:
            with (
                self._calls.serving(name, context) as call,
                watched(self._watch, context, self._limits(), self._calls) as stream,
            ):
                yield from leaving(answer(parse(kind, raw), call), stream)

        return grpc.unary_stream_rpc_method_handler(serve)

    def stream_in(self, name: str, answer: Callable[[Any, Call], bytes]) -> Any:
        """Returns the handler of a call that sends a stream."""

        def serve(messages: Iterator[bytes], context: Context) -> bytes:
            with (
                self._calls.serving(name, context) as call,
                watched(self._watch, context, self._limits(), self._calls) as stream,
            ):
                return answer(arriving(messages, stream), call)
            raise AssertionError("an error was answered already")

        return grpc.stream_unary_rpc_method_handler(serve)
