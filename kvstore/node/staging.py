"""The staging folders of one node: that of its session, and those of its earlier sessions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.node.lanes import Lanes, moved_on
from kvstore.root.interface import Root

BEFORE_MAX = 64
"""Limit on remembered session ids; a collector clears what was staged under older ones."""
WAITS_MAX = 10
"""A root that goes on removing files gets this multiple of the normal wait."""


class Staging:
    """The folders of one node. ``session`` returns the id under which it stages now."""

    def __init__(self, root: Root, session: Callable[[], bytes]) -> None:
        self._root = root
        self._session = session
        self._before: deque[bytes] = deque(maxlen=BEFORE_MAX)
        self._looked_at_count = 0

    def leave(self, session: bytes) -> None:
        """Notes that nothing more is staged under this id."""
        self._before.append(session)

    def clear(self, lanes: Lanes, timeout_s: float) -> None:
        """Removes, at the node's end, staged files that it will not publish, and its folders if they are empty.

        Waits for ``timeout_s``, and longer while files are being removed. Never raises KVStoreError: a collector or
        ``fsck`` later clears what stays on a root that hangs or refuses.
        """
        try:
            batch = lanes.start(1, lambda _: self._clear())
        except KVStoreError:
            return
        for _ in range(WAITS_MAX):
            before_count = self._looked_at_count
            if batch.join(timeout_s) or self._looked_at_count == before_count:
                break
        batch.stop()

    def _clear(self) -> bool:
        for session in sorted({*self._before, self._session()}):
            folder = places.staging_folder(session)
            for entry in list(self._root.list(folder)):
                # It belongs to a put that was cut off. If that put goes on all the same, it finds its file gone and
                # fails.
                self._root.discard(places.Name(f"{folder}/{entry.name}"))
                self._looked_at_count += 1
                moved_on()
            self._root.remove_folder(folder)
        return True
