"""When something happened to blocks, of the most recent ones."""

from __future__ import annotations

from collections.abc import Iterable


class Recent(dict[bytes, float]):
    """Times by key, the oldest note first; at most ``most`` of them."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def note(self, keys: Iterable[bytes], when_s: float) -> None:
        """Notes keys anew, and forgets the oldest if there are too many."""
        for key in keys:
            self.pop(key, None)
            self[key] = when_s
        while len(self) > self._most:
            del self[next(iter(self))]
