"""One stream of a client under watch: a peer that sends or takes nothing must not keep a thread for ever."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from kvstore.counts import WorkerCount
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.wire.frames import Frame, decode_frame
from kvstore.wire.watch import Watch, Watched
from kvstore.worker.calls import Calls
from kvstore.worker.limits import WorkerLimits


def watched(watch: Watch, context: grpc.ServicerContext, limits: WorkerLimits, calls: Calls) -> Watched:
    """Puts a call under watch: cancelled when its client moves nothing for too long. Ends with the context."""

    def cancel() -> None:
        calls.add(WorkerCount.CALLS_IDLE)
        context.cancel()

    return watch.begin(limits.idle_s, limits.stream_s_max, cancel)


def arriving(messages: Iterator[bytes], stream: Watched) -> Iterator[Frame]:
    """Yields the frames of a client, the first with ``start``.

    Waiting for the client counts as idle, our own work does not. Raises InvalidRequest if the first has no ``start`` or
    another has one; Unavailable if the watch ended it.
    """
    is_first = True
    for message in messages:
        stream.busy()
        frame = decode_frame(message)
        if is_first != (frame.start is not None):
            raise InvalidRequest(
                "the first message of the stream has no start"
                if is_first
                else "a later message of the stream has a start"
            )
        is_first = False
        yield frame
        stream.moved()
    if stream.expired:
        # gRPC may show a cancelled stream as one that ended.
        raise Unavailable("the client sent nothing for too long: the call was cancelled")
    if is_first:
        raise InvalidRequest("the stream has no message: expected one with start")
    stream.busy()


def leaving(frames: Iterator[bytes], stream: Watched) -> Iterator[bytes]:
    """Yields frames for a client. Waiting for the client counts as idle, our own work does not."""
    stream.busy()
    for frame in frames:
        stream.moved()
        yield frame
        stream.busy()
