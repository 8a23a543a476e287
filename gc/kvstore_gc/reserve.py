"""A little room that a collector keeps on the root, so that it can still make room when nobody else can write.

A sweep needs a plan and a folder before it may delete anything. On a full disk it could never begin.
"""

from __future__ import annotations

from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore_gc.site import Site

RESERVE_BYTES = 1 << 20


class Reserve:
    """One file, shared by all collectors of a root that is a file system."""

    def __init__(self, site: Site) -> None:
        self._root = site.root
        self._ids = site.ids

    def keep(self) -> None:
        """Makes the file if it is missing and there is room. Raises nothing: a round goes on without it."""
        if not self._root.traits.fenced:
            return
        session = self._ids.fresh()
        staged = places.staged(session, 0)
        try:
            if self._root.stat(places.RESERVE) is None:
                self._root.stage(staged, [memoryview(bytes(RESERVE_BYTES))], stamp_ns=0, durable=False)
                self._root.publish(staged, places.RESERVE, durable=False)
        except KVStoreError:
            pass  # full, or not answering: the next round tries again
        finally:
            try:
                self._root.discard(staged)
                self._root.remove_folder(places.staging_folder(session))
            except KVStoreError:
                pass  # the orphans of a later round

    def spend(self) -> bool:
        """Gives its room back to the root; False if it was spent before. Raises the root's errors."""
        return self._root.remove(places.RESERVE)
