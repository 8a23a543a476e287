"""A watch on etcd that outlives connections.

A thread follows the stream and fills a bounded queue; when the queue is full it stops reading, and flow control makes
etcd wait.  etcd splits a revision over several responses only for clients that ask for fragments; this one does not, so
a response is a whole number of revisions and a broken stream can be taken up after the last one.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import grpc

from kvstore.errors import PermissionDenied, Unavailable
from kvstore.meta.etcd.faults import Effect, Fault, fault_of
from kvstore.meta.etcd.members import BACKOFF_S_MAX, BACKOFF_S_MIN, Member, Members
from kvstore.meta.etcd.wire import Message, event, prefix_range, rpc
from kvstore.meta.interface import Event, WatchLost

BATCHES_MAX = 256
AUTHENTICATE_S = 5.0


class EtcdWatch:
    """See ``interface.Watch``. Gives up, with WatchLost, when no stream could be opened for ``reconnect_s``."""

    def __init__(self, members: Members, prefix: str, from_revision: int, reconnect_s: float) -> None:
        self._members = members
        self._prefix = prefix
        self._from_revision = from_revision
        self._reconnect_s = reconnect_s
        self._changed = threading.Condition()
        self._batches: deque[tuple[Event, ...]] = deque()
        self._end: WatchLost | PermissionDenied | None = None
        self._closed = False
        self._stream: Message = None
        self._thread = threading.Thread(target=self._run, name=f"etcd-watch {prefix}", daemon=True)
        self._thread.start()

    def next(self, timeout_s: float) -> tuple[Event, ...] | None:
        """See ``interface.Watch``."""
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self._end or self._closed, timeout=max(0.0, timeout_s))
            if self._closed:
                raise WatchLost("the watch is closed")
            if self._batches:
                batch = self._batches.popleft()
                self._changed.notify_all()
                return batch
            if self._end is not None:
                raise self._end
            return None

    def close(self) -> None:
        """See ``interface.Watch``. Waits for the thread to end, which it does at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            stream = self._stream
        if stream is not None:
            stream.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join(AUTHENTICATE_S)

    def _run(self) -> None:
        up_s = time.monotonic()
        backoff_s = BACKOFF_S_MIN
        token_dropped = False
        while not self._closed:
            member = self._members.current()
            fault, opened = self._follow(member)
            if opened:
                up_s, backoff_s, token_dropped = time.monotonic(), BACKOFF_S_MIN, False
            if fault.effect in (Effect.TOKEN, Effect.DENIED) and not token_dropped:
                # etcd 3.5 answers "permission denied" to a watch whose token has expired.
                token_dropped = True
                self._members.drop_token()
                continue
            end = self._end_of(fault, time.monotonic() - up_s)
            if end is not None:
                self._finish(end)
                return
            self._members.failed(member)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, timeout=backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)

    def _end_of(self, fault: Fault, down_s: float) -> WatchLost | PermissionDenied | None:
        """Returns why the watch ends with ``fault``; None if the stream should be opened again."""
        what = f"watch of {self._prefix!r} from revision {self._from_revision}"
        if fault.effect in (Effect.TOKEN, Effect.DENIED):
            return PermissionDenied(f"etcd: {what}: {fault.text}: {fault.advice}")
        if fault.effect in (Effect.COMPACTED, Effect.TOO_LARGE):
            return WatchLost(f"etcd: {what}: {fault.text}: read the prefix afresh")
        if down_s >= self._reconnect_s:
            return WatchLost(f"etcd: {what}: no connection for {down_s:.1f} s ({fault.text}): {fault.advice}")
        return None

    def _follow(self, member: Member) -> tuple[Fault, bool]:
        """Reads one stream to its end; returns why it ended, and whether it was ever opened."""
        opened = False
        key, range_end = prefix_range(self._prefix)
        request = rpc().WatchRequest(
            create_request=rpc().WatchCreateRequest(key=key, range_end=range_end, start_revision=self._from_revision)
        )
        try:
            # Without "hasleader" a member cut off from its cluster would keep a silent, stale watch open.
            metadata = (*self._members.metadata(member, AUTHENTICATE_S), ("hasleader", "true"))
            with self._changed:
                if self._closed:
                    return _CLOSED, False
                self._stream = member.watch.Watch(iter([request]), metadata=metadata)
            for response in self._stream:
                if response.canceled:
                    return _cancelled(response), opened
                opened = True
                if response.events:
                    self._offer(tuple(event(each) for each in response.events))
        except grpc.RpcError as error:
            return fault_of(error), opened
        except (ValueError, Unavailable) as error:
            # A channel that another thread closed at this moment, or no token in time.
            return Fault(Effect.UNSURE, str(error), "the watch opens the stream again"), opened
        return Fault(Effect.UNSURE, "the stream ended", "the watch opens it again"), opened

    def _offer(self, batch: tuple[Event, ...]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._batches) < BATCHES_MAX or self._closed)
            self._batches.append(batch)
            self._from_revision = batch[-1].revision + 1
            self._changed.notify_all()

    def _finish(self, end: WatchLost | PermissionDenied) -> None:
        with self._changed:
            self._end = end
            self._changed.notify_all()


_CLOSED = Fault(Effect.FAILED, "closed", "open a new watch")


def _cancelled(response: Message) -> Fault:
    reason = response.cancel_reason or "cancelled by etcd"
    if response.compact_revision:
        return Fault(Effect.COMPACTED, f"compacted up to revision {response.compact_revision}", "read afresh")
    if "auth" in reason or "permission" in reason:
        return Fault(Effect.DENIED, reason, "check that the user's role covers the prefix")
    return Fault(Effect.UNSURE, reason, "the watch opens the stream again")
