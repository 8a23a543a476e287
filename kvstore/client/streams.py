"""gRPC streams between the caller's memory and a worker: the messages of a put, and the frames of a get."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from kvstore.wire.frames import Frame, decode_frame
from kvstore.wire.parts import encode_parts
from kvstore.wire.watch import Watch, Watched


class Outgoing:
    """The messages of a put. gRPC takes them in its own thread, which must not outlive the call.

    ``close`` returns once that thread has let go of the caller's memory.
    """

    def __init__(self, parts: Iterable[memoryview], start: bytes) -> None:
        self._lock = threading.Lock()
        self._messages: Iterator[bytes] | None = encode_parts(parts, start)
        self._stream: Watched | None = None

    def watch(self, stream: Watched) -> None:
        """Counts each message taken as progress of ``stream``."""
        self._stream = stream

    def __iter__(self) -> Outgoing:
        return self

    def __next__(self) -> bytes:
        with self._lock:
            if self._messages is None:
                raise StopIteration
            if self._stream is not None:
                self._stream.moved()
            return next(self._messages)

    def close(self) -> None:
        """Ends the messages. Idempotent."""
        with self._lock:
            self._messages = None


def send_stream(stub: Any, outgoing: Outgoing, watch: Watch, idle_s: float, timeout_s: float) -> bytes:
    """Sends a stream; returns the answer. Raises what gRPC raises."""
    call = stub.future(outgoing, timeout=timeout_s)
    try:
        with watch.begin(idle_s, timeout_s, call.cancel) as stream:
            outgoing.watch(stream)
            answer: bytes = call.result()
            return answer
    finally:
        call.cancel()
        outgoing.close()


def received(
    stub: Any,
    request: bytes,
    watch: Watch,
    idle_s: float,
    timeout_s: float,
    started: Callable[[Any], None] | None = None,
) -> Generator[Frame]:
    """Yields the frames of an answer. Ends with CANCELLED if none comes for ``idle_s``. Close it to end the call."""
    call = stub(request, timeout=timeout_s)
    if started is not None:
        started(call)
    try:
        with watch.begin(idle_s, timeout_s, call.cancel) as stream:
            for message in call:
                # The worker is not at fault for what the caller does between two frames.
                stream.busy()
                yield decode_frame(message)
                stream.moved()
    finally:
        call.cancel()
