"""Compressing, decompressing and re-encrypting selected chunks as an operation: one after the other, at a pace.

Separate from rewriting one chunk, which a node does, because this goes on for hours: it must leave lanes and bandwidth
of the root to clients, wait when there is no room, and be resumable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvstore.census.selection import ClearOrder, Selection
from kvstore.census.walk import sampled, walk_shard
from kvstore.errors import KVStoreError, Overloaded, Unavailable
from kvstore.format.places import Name
from kvstore.node.clearing import resolved
from kvstore.node.lanes import Deadline, moved_on
from kvstore.node.node import Node
from kvstore.node.recoding import Outcome, Recoded, Recoding
from kvstore.worker.control.runner import Step

LOOK_S = 0.2
"""Interval between two looks at whether a folder is listed."""
PAUSE_S = 5.0
"""Pause while the root has no room for more, or does not answer."""
TROUBLES_MAX = 24
"""Attempts in a row on a root that does not answer: two minutes."""
PACE_LOOK_S = 1.0
"""Interval between two looks at the pace while waiting."""
BURST_S = 1.0
"""Time by which the work may be ahead of its pace."""


def recode_selected(
    node: Node, selection: Selection, act: Recoding, bytes_per_s: Callable[[], float], step: Step
) -> str:
    """Recodes the selected chunks at ``bytes_per_s()`` at most, counted as read.

    Raises InvalidRequest for an empty selection or a root that cannot replace files; Unavailable if the root has not
    answered for long.
    """
    order = resolved(node, selection)
    shards = sampled(node.identity.shard_bits)
    done: Counter[str] = Counter()
    pace = _Pace(node, bytes_per_s, step)
    for number, shard in enumerate(shards):
        step.progress(number, len(shards))
        for name in _names(node, order, shard, done, step):
            found = _recoded(node, name, act, step)
            done[f"chunks_{found.outcome.value}"] += 1
            done["bytes_before"] += found.before_bytes
            done["bytes_after"] += found.after_bytes
            step.count(**done)
            step.check()
            pace.spend(found.before_bytes)
    step.progress(len(shards), len(shards))
    return _said(done)


def _names(node: Node, order: ClearOrder, shard: int, done: Counter[str], step: Step) -> list[Name]:
    """Returns the selected chunks of one shard. Lists on one lane, so that clients have the others."""
    names: list[Name] = []

    def trouble(_: KVStoreError) -> None:
        done["chunks_unreadable"] += 1

    def look(_: int) -> bool:
        for found in walk_shard(node.root, shard, headers=order.needs_headers, trouble=trouble):
            moved_on()
            if order.takes(found):
                names.append(found.name)
        return True

    batch = node.begin_on_root(1, look)
    try:
        while not batch.join(LOOK_S):
            step.check()
    finally:
        batch.stop()
    batch.wait(Deadline(node.clock, LOOK_S))
    return names


def _recoded(node: Node, name: Name, act: Recoding, step: Step) -> Recoded:
    troubles = 0
    while True:
        try:
            return node.on_root(lambda: node.recoder.recode(name, act))
        except Overloaded:
            pass  # replaced files must not go yet, or a collector is making room
        except Unavailable:
            troubles += 1
            if troubles > TROUBLES_MAX:
                raise
        step.pause(PAUSE_S)


class _Pace:
    """Keeps to a rate of bytes per second, which may change meanwhile."""

    def __init__(self, node: Node, bytes_per_s: Callable[[], float], step: Step) -> None:
        self._clock = node.clock
        self._bytes_per_s = bytes_per_s
        self._step = step
        self._seen_s = self._clock.monotonic_s()
        self._owed_bytes = 0.0

    def spend(self, size_bytes: int) -> None:
        """Waits until the next chunk may begin. Raises as ``Step.check`` does."""
        self._pay()
        self._owed_bytes += size_bytes
        while self._owed_bytes > 0:
            # In short steps: a wait of hours at a mistaken pace must notice when the pace is corrected.
            self._step.pause(min(self._owed_bytes / self._bytes_per_s(), PACE_LOOK_S))
            self._pay()

    def _pay(self) -> None:
        """Subtracts what the time since the last look allowed."""
        now_s, bytes_per_s = self._clock.monotonic_s(), self._bytes_per_s()
        self._owed_bytes -= (now_s - self._seen_s) * bytes_per_s
        self._owed_bytes = max(self._owed_bytes, -BURST_S * bytes_per_s)
        self._seen_s = now_s


def _said(done: Counter[str]) -> str:
    said = []
    if done[f"chunks_{Outcome.NO_KEY.value}"]:
        said.append("some are encrypted with keys that this worker does not have (--keys)")
    if done[f"chunks_{Outcome.DAMAGED.value}"]:
        said.append("some are damaged: kvstore fsck --repair")
    if done["chunks_unreadable"]:
        said.append("some could not be read: ask again")
    return "; ".join(said)
