"""A watch whose stream breaks: every event comes once, in order, wherever it breaks."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.meta.etcd.client import EndpointPool, EtcdWatch
from kvstore.meta.etcd.messages import rpc
from tests.kit.patience import PATIENCE_S


class Streams:
    """A member of etcd with events of ``revisions``. The n-th stream breaks after ``parts[n]`` responses.

    The header of every response has the newest revision, as while a watch catches up. Each response has one event.
    """

    def __init__(self, revisions: Sequence[int], parts: Iterable[int]) -> None:
        self.revisions = revisions
        self._parts = iter(parts)
        self.starts: list[int] = []
        """The revision from which each stream was requested."""

    def Watch(self, requests: Iterator[Any], metadata: object = ()) -> _Stream:  # the name in the stub
        start = next(requests).create_request.start_revision
        self.starts.append(start)
        left = [self._response(each) for each in self.revisions if each >= start]
        count = next(self._parts, None)
        return _Stream(left if count is None else left[:count], is_endless=count is None)

    def _response(self, revision: int) -> Any:
        response = rpc().WatchResponse()
        response.header.revision = self.revisions[-1]
        event = response.events.add()
        event.kv.key, event.kv.mod_revision, event.kv.create_revision = b"/kv/a", revision, revision
        return response


class _Stream:
    def __init__(self, responses: list[Any], is_endless: bool) -> None:
        self._responses = responses
        self._is_endless = is_endless
        self._cancelled = threading.Event()

    def __iter__(self) -> Iterator[Any]:
        yield from self._responses
        if self._is_endless:
            self._cancelled.wait(PATIENCE_S)

    def cancel(self) -> None:
        self._cancelled.set()


def received(streams: Streams, from_revision: int, count: int) -> list[int]:
    """The revisions of the first ``count`` events of a watch; fewer if it falls silent."""
    member = SimpleNamespace(watch=streams)
    members = SimpleNamespace(
        current=lambda: member, metadata=lambda *_: (), failed=lambda _: None, drop_token=lambda: None
    )
    watch = EtcdWatch(cast(EndpointPool, members), "/kv/", from_revision, PATIENCE_S)
    found: list[int] = []
    try:
        while len(found) < count and (batch := watch.next(5.0)) is not None:
            found += [event.revision for event in batch]
    finally:
        watch.close()
    return found


REVISIONS = [5, 6, 8, 9, 12]


@pytest.mark.parametrize("parts", [(), (1,), (2,), (4,), (1, 1), (2, 0, 1), (0,)], ids=str)
def test_watch_after_breaks_has_every_event_once(parts: tuple[int, ...]) -> None:
    """``parts`` are the events before each break."""
    streams = Streams(REVISIONS, parts)
    assert received(streams, 5, len(REVISIONS)) == REVISIONS, streams.starts
    assert len(streams.starts) == len(parts) + 1


def test_watch_from_later_revision_has_later_events_only() -> None:
    assert received(Streams(REVISIONS, (1,)), 8, 3) == [8, 9, 12]
