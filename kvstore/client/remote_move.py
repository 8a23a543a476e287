"""A prefetch, move or release at a worker: one call that lasts as long as it does, followed in its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc

from kvstore.client.endpoint import Endpoint
from kvstore.errors import KVStoreError, Overloaded, Unavailable
from kvstore.node.moves import Act, Level
from kvstore.v1 import kvstore_pb2 as pb

MOVES_MAX = 64
"""Maximum of moves of one client, one thread each; more are refused. A worker has its own limit."""


_ACTS = {Act.PREFETCH: pb.ACT_PREFETCH, Act.MOVE: pb.ACT_MOVE, Act.RELEASE: pb.ACT_RELEASE}
_LEVELS = {Level.MEMORY: pb.TIER_MEMORY, Level.DISK: pb.TIER_DISK, Level.ROOT: pb.TIER_ROOT}


def move_message(namespace: bytes, packed_tokens: bytes, act: Act, level: Level) -> pb.MoveRequest:
    """Returns the request to a worker."""
    return pb.MoveRequest(namespace=namespace, tokens=packed_tokens, act=_ACTS[act], tier=_LEVELS[level])


class Slots:
    """The moves in progress, at most MOVES_MAX. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[object] = set()

    def take(self, owner: object) -> None:
        """Takes a place for ``owner``. Raises Overloaded if there are too many."""
        with self._lock:
            if len(self._taken) >= MOVES_MAX:
                raise Overloaded(f"{MOVES_MAX} prefetches and moves of this client are not done yet: back off")
            self._taken.add(owner)

    def give(self, owner: object) -> None:
        """Gives back the place of ``owner``, if it has one."""
        with self._lock:
            self._taken.discard(owner)


class RemoteMove:
    """Implements ``PortMove``. Call ``begin`` once."""

    def __init__(self, request: bytes, slots: Slots) -> None:
        self._request = request
        self._slots = slots
        self._changed = threading.Condition()
        self._chunks = 0
        self._is_accepted = False
        self._is_done = False
        self._is_cancelled = False
        self._error: KVStoreError | None = None
        self._call: Any = None

    @property
    def chunks(self) -> int:
        """Implements ``PortMove.chunks``."""
        return self._chunks

    @property
    def done(self) -> bool:
        """Implements ``PortMove.done``."""
        return self._is_done

    @property
    def error(self) -> KVStoreError | None:
        """Implements ``PortMove.error``."""
        return self._error

    def begin(self, send: Callable[[Callable[[Endpoint, float], None]], None], timeout_s: float) -> None:
        """Lets ``send`` find a worker for ``follow``; returns once one has accepted, raises what it answered.

        Raises Unavailable, and cancels, if none answers in time; Overloaded if too many moves are in progress.
        """
        thread = threading.Thread(target=self._run, args=(send,), name="kvstore-client-move", daemon=True)
        try:
            self._slots.take(self)
            thread.start()
            with self._changed:
                in_time = self._changed.wait_for(lambda: self._is_accepted or self._is_done, timeout_s)
        except BaseException:  # interrupted (Ctrl-C), perhaps inside start: nobody then knows whether the thread runs
            self.cancel()
            self._slots.give(self)
            raise
        if not in_time:
            self.cancel()
            raise Unavailable(f"no worker answered within {timeout_s:g} s: retry later")
        if not self._is_accepted and self._error is not None:
            raise self._error

    def wait(self, timeout_s: float | None = None) -> int:
        """Implements ``PortMove.wait``."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_done, timeout_s)
            return self._chunks

    def cancel(self) -> None:
        """Implements ``PortMove.cancel``."""
        with self._changed:
            self._is_cancelled = True
            call = self._call
        if call is not None:
            call.cancel()

    def _run(self, send: Callable[[Callable[[Endpoint, float], None]], None]) -> None:
        error: KVStoreError | None = None
        try:
            send(self._follow)
        except KVStoreError as failed:
            error = failed
        finally:
            self._slots.give(self)
            with self._changed:
                self._error = None if self._is_cancelled else error
                self._is_done = True
                self._changed.notify_all()

    def _follow(self, endpoint: Endpoint, left_s: float) -> None:
        """Sends the call to one worker, and listens until it ends."""
        with self._changed:
            if self._is_cancelled:
                return
            call = self._call = endpoint.stream_in("Move")(self._request, timeout=left_s)
        try:
            for message in call:
                chunks = pb.MoveResponse.FromString(message).chunks
                with self._changed:
                    self._is_accepted, self._chunks = True, chunks
                    self._changed.notify_all()
        except grpc.RpcError:
            if not self._is_cancelled:
                raise
        finally:
            call.cancel()
