"""Clears what a selection names on a root that the processes of one host share: an eviction with a selection."""

from __future__ import annotations

import time
from collections.abc import Callable, Container

from kvstore.address import Address
from kvstore.census.selection import ClearOrder
from kvstore.census.walk import Found, walk
from kvstore.errors import KVStoreError
from kvstore.host.clears import HostClears
from kvstore.host.eviction import Evicted, Eviction, Victim, file_system_now_ns
from kvstore.node.host import Host
from kvstore.node.node import Node
from kvstore.progress import Progress
from kvstore.results import Cleared
from kvstore.root.fences import make_room
from kvstore.root.posix import PosixRoot, translated

AT_ONCE = 4096
HELD_S = 5.0
"""What is held is deleted if its hold ends within this time."""
POLL_S = 0.1


class HostClearing:
    """The clears of one process."""

    def __init__(self, node: Node, host: Host, pinned: Callable[[], Container[Address]]) -> None:
        assert isinstance(node.root, PosixRoot)
        self._node = node
        self._host = host
        self._root = node.root
        self._pinned = pinned
        obey = node.obey if node.tiers is not None else None
        self.clears = HostClears(host.folder, host.shared, host.table, obey, node.sweep_disk)

    def count(self, order: ClearOrder, progress: Progress, *, pinned: bool = False) -> Cleared:
        """Counts what ``clear`` would delete; changes nothing."""
        kept = () if pinned else self._pinned()
        found, failed = self._found(order, progress)
        free = [one for one in found if one.address not in kept]
        return Cleared(len(free), sum(one.size_bytes for one in free), len(found) - len(free), failed)

    def clear(self, order: ClearOrder, progress: Progress, *, pinned: bool = False) -> Cleared:
        """Deletes what the order names, from the memory of all processes first. ``pinned``: what is pinned too.

        Raises Unavailable, the root's errors, and what ``progress`` raises: clear again.
        """
        progress(0, 0)
        make_room(self._root)  # the order is written before anything is deleted
        with translated("write", f"{self._host.folder}/host"):
            silent = self.clears.tell(order)
        count = size_bytes = 0
        ends_s = time.monotonic() + HELD_S
        while True:
            # What is put or used during the walk is for the next one: a child that this walk lacks keeps its parent.
            since_ns = file_system_now_ns(self._host.folder)
            eviction = Eviction(
                self._root, self._node.identity.shard_bits, self._host.shared, self._node.clock, since_ns
            )
            found, failed = self._found(order, progress)
            found.sort(key=_worth)  # children before their parents
            victims = [Victim(one.address, one.namespace, one.size_bytes) for one in found]
            left = Evicted()
            for start in range(0, len(victims), AT_ONCE):
                left += eviction.evict(victims[start : start + AT_ONCE], even_pinned=pinned)
                progress(count + left.count, count + len(victims))
            count, size_bytes = count + left.count, size_bytes + left.size_bytes
            stay_count = len(left.held) + left.used_count
            if not stay_count or time.monotonic() > ends_s:
                break
            time.sleep(POLL_S)
        return Cleared(count, size_bytes, left.pinned_count + stay_count, failed + left.failed_count, silent)

    def _found(self, order: ClearOrder, progress: Progress) -> tuple[list[Found], int]:
        """Returns the chunks that the order names, and how many shards or files could not be read."""
        failures: list[KVStoreError] = []
        chunks = walk(
            self._root,
            self._node.identity.shard_bits,
            headers=order.needs_headers,
            quantum_s=self._node.limits.quantum_s,
            trouble=failures.append,
            shard_done=progress,
        )
        return [one for one in chunks if order.means(one.namespace) and order.takes(one)], len(failures)


def _worth(found: Found) -> tuple[float, int]:
    return found.recency.last_use_s, -found.recency.depth
