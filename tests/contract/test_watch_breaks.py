"""A watch whose stream breaks: every event comes once, in order, wherever it breaks."""

from __future__ import annotations

import pytest

from tests.kit.watch_streams import Streams, received

REVISIONS = [5, 6, 8, 9, 12]


@pytest.mark.parametrize("parts", [(), (1,), (2,), (4,), (1, 1), (2, 0, 1), (0,)], ids=str)
def test_watch_after_breaks_has_every_event_once(parts: tuple[int, ...]) -> None:
    """``parts`` are the events before each break."""
    streams = Streams(REVISIONS, parts)
    assert received(streams, 5, len(REVISIONS)) == REVISIONS, streams.starts
    assert len(streams.starts) == len(parts) + 1


def test_watch_from_later_revision_has_later_events_only() -> None:
    assert received(Streams(REVISIONS, (1,)), 8, 3) == [8, 9, 12]
