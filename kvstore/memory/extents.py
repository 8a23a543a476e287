"""Extents: which parts of a fixed size are taken. Best fit over pages; free neighbours join.

Separate from the arena that it divides, because it is pure arithmetic.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from kvstore.errors import InvalidRequest

PAGE_BYTES = 4096


class Extents:
    """Runs of pages of ``size_bytes``, as a ``Room``; a partial last page is never given out.

    Taking and giving cost a bisection of the free runs. Not thread-safe.
    """

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < PAGE_BYTES:
            raise InvalidRequest(f"room of {size_bytes} bytes: expected at least one page of {PAGE_BYTES} bytes")
        self._pages_count = size_bytes // PAGE_BYTES
        self._free_pages = self._pages_count
        self._taken: dict[int, int] = {}
        # Each free run is kept three times: by its first page, by the page after it, and in order of size, lowest
        # first.
        self._free: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._sizes: list[tuple[int, int]] = []
        self._add_free(0, self._pages_count)

    @property
    def size_bytes(self) -> int:
        """The whole room, in whole pages."""
        return self._pages_count * PAGE_BYTES

    @property
    def free_bytes(self) -> int:
        """Bytes that are not taken, in however many pieces."""
        return self._free_pages * PAGE_BYTES

    @property
    def largest_bytes(self) -> int:
        """The most that can be taken at once."""
        return self._sizes[-1][0] * PAGE_BYTES if self._sizes else 0

    def take(self, size_bytes: int) -> int | None:
        """Takes ``size_bytes`` bytes (1 or more); returns their offset, or None if no free run is long enough."""
        if size_bytes < 1:
            raise InvalidRequest(f"room for {size_bytes} bytes: expected at least 1")
        pages = -(-size_bytes // PAGE_BYTES)
        place = bisect_left(self._sizes, (pages, 0))
        if place == len(self._sizes):
            return None
        count, first = self._sizes[place]
        self._remove_free(first, count)
        if count > pages:
            self._add_free(first + pages, count - pages)
        self._taken[first] = pages
        self._free_pages -= pages
        return first * PAGE_BYTES

    def give(self, offset: int) -> None:
        """Gives back what was taken at ``offset``. Raises InvalidRequest if nothing is taken there."""
        first = offset // PAGE_BYTES
        if offset % PAGE_BYTES or first not in self._taken:
            raise InvalidRequest(f"nothing is taken at offset {offset}: give back what take() returned, once")
        count = self._taken.pop(first)
        self._free_pages += count
        before = self._ends.get(first)
        after = self._free.get(first + count)
        if after is not None:
            self._remove_free(first + count, after)
            count += after
        if before is not None:
            count += first - before
            self._remove_free(before, first - before)
            first = before
        self._add_free(first, count)

    def _add_free(self, first: int, count: int) -> None:
        self._free[first] = count
        self._ends[first + count] = first
        insort(self._sizes, (count, first))

    def _remove_free(self, first: int, count: int) -> None:
        del self._free[first]
        del self._ends[first + count]
        del self._sizes[bisect_left(self._sizes, (count, first))]
