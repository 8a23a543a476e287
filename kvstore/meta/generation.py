"""Whether etcd and the root belong together: the generation that both hold, made by the first node, compared by all.

The root's side is passed in as two calls, because metadata know no roots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.errors import RootMismatch, Unavailable
from kvstore.format.generation import Generation
from kvstore.meta.deadline import TRIES_MAX, Deadline
from kvstore.meta.interface import Absent, Meta, Put
from kvstore.meta.keys import Keys
from kvstore.sources import Ids

LOOKS_MAX = 2
"""Both sides cannot be read at one moment: what differs while one is being written agrees at the second look."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """Both sides have this generation: holds and pins protect, collectors may run."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Foreign:
    """etcd was wiped, or is another cluster's; ``why`` says so in words for a log or an error, and what to do.

    Nodes serve without protection and refuse pins, collectors do not run, until ``kvstore fsck --adopt``.
    """

    why: str


Standing = Agreed | Foreign


def join_generation(
    meta: Meta,
    keys: Keys,
    ids: Ids,
    *,
    read_root: Callable[[], Generation | None],
    publish_root: Callable[[Generation], Generation],
    timeout_s: float | None = None,
) -> Standing:
    """Compares the root's generation with etcd's; makes the first one where neither has any. Call it for each session,
    after the session's key was put, and at the start of a collector.

    ``read_root`` gives the root's newest generation, ``publish_root`` publishes one and gives the newest afterwards
    (``kvstore.root.generations``); what they raise comes out of here, but RootMismatch, which means Foreign.
    ``timeout_s`` is for the calls to ``meta`` only. Raises Unavailable where it stays unknown, PermissionDenied.
    """
    deadline = Deadline(timeout_s)
    why = ""
    for _ in range(LOOKS_MAX):
        try:
            on_root = read_root()
            # The root first: of two that make the first generation, none publishes it before etcd has it.
            in_meta = read_generation(meta, keys, deadline.left_s(0.5))
            if on_root is None:
                # Also where only etcd has one: whoever made it may have died before the root got it.
                in_meta = in_meta or _first(meta, keys, Generation(1, ids.fresh()), deadline)
                on_root = publish_root(in_meta)
        except RootMismatch as mismatch:
            why = str(mismatch)
            continue
        if on_root == in_meta:
            return Agreed(on_root)
        why = f"the root is of generation {on_root}, etcd " + (f"of {in_meta}" if in_meta else "has none")
    return Foreign(
        f"{why}: etcd was wiped, restored, or is another cluster's. Chunks are served, but nothing is protected and "
        "nothing collected until `kvstore fsck ROOT --adopt --etcd ENDPOINTS` was run (gc/RUNBOOK.md)"
    )


def read_generation(meta: Meta, keys: Keys, timeout_s: float | None = None) -> Generation | None:
    """etcd's generation; None where it has none. Raises RootMismatch where it cannot be read."""
    found = meta.get(keys.generation, timeout_s)
    return None if found is None else Generation.from_json(found.value, keys.generation)


def _first(meta: Meta, keys: Keys, mine: Generation, deadline: Deadline) -> Generation:
    """Puts the first generation, unless another node was faster: what etcd has afterwards."""
    tries_left = TRIES_MAX
    while True:
        try:
            meta.txn((Absent(keys.generation),), (Put(keys.generation, mine.to_json()),), deadline.left_s(0.5))
        except Unavailable:
            # Unknown: read back below; a late one meets the compare.
            tries_left -= 1
            if not tries_left or deadline.over:
                raise
        found = read_generation(meta, keys, deadline.left_s(0.5))
        if found is not None:
            return found
        if deadline.over:
            raise Unavailable("the generation could not be recorded in etcd in time: the call may be repeated")
