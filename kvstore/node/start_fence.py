"""What a node of a cluster does before a session of it protects anything: it compares generations, and fences.

Separate from the follower, which looks at etcd alone: here is all that it needs of the root.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.errors import RootMismatch, Unavailable
from kvstore.meta.cluster import Standing
from kvstore.meta.keys import Keys
from kvstore.meta.store import Meta
from kvstore.meta.sweeps import Condemned
from kvstore.root.fences import lift_unnamed
from kvstore.root.interface import Root


class StartFence:
    """The root of one node, for its follower.

    ``on_root`` does something with the root under a deadline of its own, such as on a lane.  ``standing`` compares the
    generations of root and etcd (rule C6).
    """

    def __init__(
        self,
        root: Root,
        shard_bits: int,
        on_root: Callable[[Callable[[], object]], object],
        standing: Callable[[], Standing],
        meta: Meta,
        keys: Keys,
        meta_deadline_s: float,
    ) -> None:
        self._root = root
        self._shard_bits = shard_bits
        self._on_root = on_root
        self.standing = standing
        self._meta = meta
        self._keys = keys
        self._meta_deadline_s = meta_deadline_s

    def lift_unnamed(self) -> None:
        """Follows rule C4: a trash folder that no condemned key names belongs to a sweep that etcd has forgotten.

        Raises PermissionDenied where this node may not fence, Unavailable, what the root raises.
        """
        if self._root.traits.fenced:
            self._on_root(self._lift_unnamed)

    def _lift_unnamed(self) -> int:
        return lift_unnamed(self._root, self._shard_bits, self._named)

    def _named(self) -> set[bytes]:
        """Returns the sweeps in flight. Raises Unavailable if one cannot be read: it may name any folder."""
        found = self._meta.list(self._keys.condemned, self._meta_deadline_s)
        try:
            return {Condemned.from_bytes(kv.value).sweep for kv in found.items}
        except RootMismatch as error:
            raise Unavailable(f"the keys of garbage collection in etcd cannot be read: {error}") from error
