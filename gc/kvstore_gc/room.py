"""How much nodes may write before a collector has counted it: the word under ``gc/room``, as a rule without I/O.

It makes the limit independent of how late anything is: all nodes together may write, beyond what a collector has
counted, no more than lies between the stop mark and the capacity, and nothing once it has counted up to that mark.
"""

from __future__ import annotations

from kvstore.meta.usage import Room
from kvstore_gc.capacity import Watermarks

REPORTS_PER_S = 100
"""The limit of reports of all nodes together."""
PACE_S_MIN = 0.1
WORDS_PER_PACE = 10
"""Words are said at most this often in the time between two reports of a node."""
STEP_SHARE = 1 / 4
"""A node reports when it wrote this share of its part of the room between the high watermark and the stop mark."""
CHANGE_SHARE = 1 / 8
"""An allowance that changed by this share is a new word, also without new reports."""
SPARE_SHARE = 1 / 8
"""For nodes that join before the next word: one more for so many, at least one."""


def room_of(watermarks: Watermarks, nodes_count: int, revision: int) -> Room:
    """What there is room for when the reports up to ``revision`` are counted (gc/PROTOCOL.md, section 6).

    Together nodes may write what lies between the stop mark and the capacity, at any level below the mark: a larger
    allowance at a lower level would still be in the hands of a node that hears of nothing since.
    """
    level, nodes_count = watermarks.level, max(1, nodes_count)
    pace_s = max(PACE_S_MIN, nodes_count / REPORTS_PER_S)
    if level is None:
        return Room(revision, None, None, pace_s)  # the first survey goes on: nodes say where they begin
    shares = nodes_count + max(1, round(nodes_count * SPARE_SHARE))
    beyond_bytes = 0.0 if level.over(watermarks.stop) else (1 - watermarks.stop) * level.capacity_bytes
    band_bytes = (watermarks.stop - watermarks.high) * level.capacity_bytes
    return Room(revision, int(beyond_bytes / shares), max(1, int(STEP_SHARE * band_bytes / nodes_count)), pace_s)


def is_news(said: Room, room: Room) -> bool:
    """Whether nodes should hear of a word, after the one that was said last."""
    if said.allowance_bytes is None or room.allowance_bytes is None:
        return said.allowance_bytes != room.allowance_bytes
    changed = abs(room.allowance_bytes - said.allowance_bytes)
    return (
        room.revision > said.revision
        or room.pace_s != said.pace_s
        or changed > CHANGE_SHARE * max(room.allowance_bytes, said.allowance_bytes)
    )
