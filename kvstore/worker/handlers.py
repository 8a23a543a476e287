"""gRPC handlers: messages travel as bytes; a call is admitted, watched, and its message parsed inside.

Separate from the services, because an error in any call is answered alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from kvstore.counts import WorkerCount
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire.messages import parse
from kvstore.wire.watch import Watch, Watched
from kvstore.worker.call import Call
from kvstore.worker.calls import Calls, UnaryCall
from kvstore.worker.limits import WorkerLimits

Request = TypeVar("Request", bound=Message)
Context = grpc.ServicerContext


class Handlers:
    """Makes handlers. A peer that sends or takes nothing must not keep a thread for ever: streams are watched."""

    def __init__(self, calls: Calls, watch: Watch, limits: WorkerLimits) -> None:
        self._calls = calls
        self._watch = watch
        self.limits = limits
        """Limits of a call that begins now."""

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
            with self._calls.serving(name, context) as call, self._watched(context) as stream:
                yield from _leaving(answer(parse(kind, raw), call), stream)

        return grpc.unary_stream_rpc_method_handler(serve)

    def put(self, name: str, answer: Callable[[Iterator[pb.PutRequest], Call], bytes]) -> Any:
        """Returns the handler of a call that sends a stream of chunks."""

        def serve(messages: Iterator[bytes], context: Context) -> bytes:
            with self._calls.serving(name, context) as call, self._watched(context) as stream:
                return answer(_arriving(messages, stream), call)
            raise AssertionError("an error was answered already")

        return grpc.stream_unary_rpc_method_handler(serve)

    def _watched(self, context: Context) -> Watched:
        """Puts a call under watch: cancelled when its client moves nothing for too long. Ends with the context."""

        def cancel() -> None:
            self._calls.add(WorkerCount.CALLS_IDLE)
            context.cancel()

        return self._watch.begin(self.limits.idle_s, self.limits.stream_s_max, cancel)


def _arriving(messages: Iterator[bytes], stream: Watched) -> Iterator[pb.PutRequest]:
    """Yields the messages of a client, the first with ``start``.

    Waiting for the client counts as idle, our own work does not. Raises InvalidRequest if the first has no ``start`` or
    another has one; Unavailable if the watch ended it.
    """
    is_first = True
    for raw in messages:
        stream.busy()
        message = parse(pb.PutRequest, raw)
        if is_first != message.HasField("start"):
            raise InvalidRequest(
                "the first message of the stream has no start"
                if is_first
                else "a later message of the stream has a start"
            )
        is_first = False
        yield message
        stream.moved()
    if stream.expired:
        # gRPC may show a cancelled stream as one that ended.
        raise Unavailable("the client sent nothing for too long: the call was cancelled")
    if is_first:
        raise InvalidRequest("the stream has no message: expected one with start")
    stream.busy()


def _leaving(messages: Iterator[bytes], stream: Watched) -> Iterator[bytes]:
    """Yields messages for a client. Waiting for the client counts as idle, our own work does not."""
    stream.busy()
    for message in messages:
        stream.moved()
        yield message
        stream.busy()
