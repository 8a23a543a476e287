"""The generation that root and etcd both have: proof that they belong together.

The first node makes it, and every session compares it. The root's side is passed in as two calls, because metadata know
no roots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.errors import RootMismatch
from kvstore.format.generation import Generation
from kvstore.meta.deadline import Deadline
from kvstore.meta.first import put_first
from kvstore.meta.interface import Meta
from kvstore.meta.keys import Keys
from kvstore.sources import Ids

LOOKS_MAX = 2
"""Both sides cannot be read at one moment. If they differ while one is being written, they agree at the second look."""
ADVICE = (
    "etcd was wiped, restored, or is another cluster's. Chunks are served, but nothing is protected and nothing "
    "collected until `kvstore fsck ROOT --adopt --etcd ENDPOINTS` was run (gc/RUNBOOK.md)"
)


@dataclass(frozen=True, slots=True)
class Agreed:
    """Both sides have this generation: holds and pins protect, collectors may run."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Foreign:
    """etcd was wiped, or is another cluster's. ``why`` is the text for a log or an error, with what to do.

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
    """Compares the root's generation with etcd's; makes the first one if neither has any.

    Call it for each session, after the session's key was put, and at the start of a collector.

    ``read_root`` returns the root's newest generation, ``publish_root`` publishes one and returns the newest afterwards
    (``kvstore.root.generations``). Their errors are raised, except RootMismatch, which means Foreign. ``timeout_s`` is
    for the calls to ``meta`` only. Raises Unavailable if the answer stays unknown, PermissionDenied.
    """
    deadline = Deadline(timeout_s)
    why = ""
    for _ in range(LOOKS_MAX):
        try:
            on_root = read_root()
            # The root first: if two nodes make the first generation, neither publishes it before etcd has it.
            in_meta = read_generation(meta, keys, deadline.left_s(0.5))
            if on_root is None:
                # Also if only etcd has one: its maker may have died before the root got it.
                if in_meta is None:
                    mine = Generation(1, ids.fresh())
                    value = put_first(meta, keys.generation, mine.to_json(), deadline, "the generation")
                    in_meta = Generation.from_json(value, keys.generation)
                on_root = publish_root(in_meta)
        except RootMismatch as mismatch:
            why = f"{mismatch}: {ADVICE}"
            continue
        if on_root == in_meta:
            return Agreed(on_root)
        why = difference(on_root, in_meta)
    return Foreign(why)


def difference(on_root: Generation, in_meta: Generation | None) -> str:
    """Returns the difference in words, with what to do."""
    return f"the root is of generation {on_root}, etcd {f'of {in_meta}' if in_meta else 'has none'}: {ADVICE}"


def read_generation(meta: Meta, keys: Keys, timeout_s: float | None = None) -> Generation | None:
    """Returns etcd's generation; None if it has none. Raises RootMismatch if it cannot be read."""
    found = meta.get(keys.generation, timeout_s)
    return None if found is None else Generation.from_json(found.value, keys.generation)
