"""The record of a cluster in etcd: its root, and the generation of its metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.core.clock import Ids
from kvstore.errors import RootMismatch, Unavailable
from kvstore.format.header import Generation
from kvstore.meta.keys import ID_BYTES, ROOTS, Keys, root_binding
from kvstore.meta.store import TRIES_MAX, Absent, EtcdDeadline, MetadataStore, Put

# Writes keys that the first writer makes and all others accept. A lost reply is settled by reading back.


def put_first(meta: MetadataStore, key: str, value: bytes, deadline: EtcdDeadline, what: str) -> bytes:
    """Writes ``value`` unless the key exists; returns the value that it has afterwards.

    Raises Unavailable, naming ``what``, if that stays unknown: the call may be repeated.
    """
    tries_left = TRIES_MAX
    while True:
        found = meta.get(key, deadline.left_s(0.5))
        if found is not None:
            return found.value
        if deadline.over:
            raise Unavailable(f"{what} could not be recorded in etcd in time: the call may be repeated")
        try:
            meta.txn((Absent(key),), (Put(key, value),), deadline.left_s(0.5))
        except Unavailable:
            # Unknown: the next round reads back, and a late transaction meets the compare.
            tries_left -= 1
            if not tries_left or deadline.over:
                raise


# Records which root is at a URL: a node that finds another root there refuses it, such as an empty mount point.


def bind_root(meta: MetadataStore, url: str, root_id: bytes, timeout_s: float | None = None) -> None:
    """Records that the root at ``url`` has ``root_id``, or checks it if that is recorded already.

    Raises RootMismatch if another root was found there before, Unavailable if the store did not answer.
    """
    key = root_binding(url)
    known = put_first(meta, key, root_id, EtcdDeadline(timeout_s), f"the root at {url}")
    if known != root_id:
        raise RootMismatch(
            f"{url} has root {root_id.hex()}, but this cluster knows root {known.hex()} there: is the right file "
            f"system mounted? If the root was replaced on purpose, run: {forget_command(url)}"
        )


def forget_command(url: str, endpoints: str | Sequence[str] = ()) -> str:
    """Returns the command that makes a cluster forget which root is at ``url``."""
    joined = endpoints if isinstance(endpoints, str) else ",".join(endpoints)
    return f"etcdctl {f'--endpoints={joined} ' if joined else ''}del {root_binding(url)}"


def bound_root(meta: MetadataStore, url: str, timeout_s: float | None = None) -> bytes | None:
    """Returns the id of the root that this cluster knows at ``url``; None if it knows none. Raises Unavailable."""
    found = meta.get(root_binding(url), timeout_s)
    return found.value if found else None


def check_bound(meta: MetadataStore, url: str, root_id: bytes) -> None:
    """Raises RootMismatch if this cluster knows another root at ``url``, Unavailable if its etcd does not answer."""
    if bound_root(meta, url) not in (None, root_id):
        raise RootMismatch(
            f"{url} is root {root_id.hex()}, but this etcd knows another root there: is the right file system mounted, "
            "and is it this cluster's etcd?"
        )


def known_roots(meta: MetadataStore, timeout_s: float | None = None) -> list[bytes]:
    """The ids of all roots that this cluster knows, sorted. Raises Unavailable."""
    return sorted({kv.value for kv in meta.list(ROOTS, timeout_s).items if len(kv.value) == ID_BYTES})


# The generation that root and etcd both have: proof that they belong together.
#
# The first node makes it, and every session compares it. The root's side is passed in as two calls, because metadata
# know no roots.


LOOKS_MAX = 2
"""Both sides cannot be read at one moment. If they differ while one is being written, they agree at the second look."""
ADVICE = (
    "etcd was wiped, restored, or is another cluster's. Chunks are served, but nothing is protected and nothing "
    "collected until `kvstore fsck ROOT --adopt --etcd ENDPOINTS` was run (deploy/RUNBOOK.md)"
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
    meta: MetadataStore,
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
    (``kvstore.root.identity``). Their errors are raised, except RootMismatch, which means Foreign. ``timeout_s`` is
    for the calls to ``meta`` only. Raises Unavailable if the answer stays unknown, PermissionDenied.
    """
    deadline = EtcdDeadline(timeout_s)
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


def read_generation(meta: MetadataStore, keys: Keys, timeout_s: float | None = None) -> Generation | None:
    """Returns etcd's generation; None if it has none. Raises RootMismatch if it cannot be read."""
    found = meta.get(keys.generation, timeout_s)
    return None if found is None else Generation.from_json(found.value, keys.generation)
