"""Queues: the entries of an inventory in the order in which its policy evicts them.

Separate from the inventory, which says what may be evicted; queues say which of those goes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from kvstore.memory.entry import Entry, Queue, Worth
from kvstore.memory.policy import Policy

STALE_MAX = 64
"""Limit on stale turns beyond the number of valid ones, before the heaps are cleaned."""
RETIRED = Worth(octaves=-math.inf)
"""The worth of entries that their users said they will not need soon: they go before all that a policy ranks."""


class Queues:
    """The order of eviction. A stale turn stays in its heap until it surfaces, or until most turns are stale."""

    def __init__(self, policy: Policy, is_evictable: Callable[[Entry], bool]) -> None:
        self._policy = policy
        self._is_evictable = is_evictable
        self._queues: dict[Worth, Queue] = {}
        self._ticket = 0
        self._turns_count = 0
        self._tickets_count = 0

    def enter(self, entry: Entry) -> None:
        """Counts an entry in; it has no turn yet."""
        entry.queue = self._queue(self._worth(entry))
        entry.queue.held_bytes += entry.size_bytes

    def leave(self, entry: Entry) -> None:
        """Counts an entry out."""
        entry.queue.held_bytes -= entry.size_bytes
        self._withdraw(entry)

    def moved(self, entry: Entry) -> None:
        """Notes that an entry was used, or is valued differently: its turn comes later, if it has one."""
        worth = self._worth(entry)
        if worth != entry.queue.worth:
            entry.queue.held_bytes -= entry.size_bytes
            entry.queue = self._queue(worth)
            entry.queue.held_bytes += entry.size_bytes
        if entry.ticket:
            self._withdraw(entry)
            self.offer(entry)

    def offer(self, entry: Entry) -> None:
        """Gives an entry a turn if it may be evicted and has none. Call it whenever that may have become true."""
        if entry.ticket or not self._is_evictable(entry):
            return
        self._ticket += 1
        entry.ticket = self._ticket
        self._tickets_count += 1
        self.put_back(entry)
        if self._turns_count > 2 * self._tickets_count + STALE_MAX:
            self._clean()

    def pop(self, now_s: float) -> Entry | None:
        """Returns the entry that goes first, without its turn, to be dropped or ``put_back``; None if none may go."""
        queues = list(self._queues.values())
        candidates = [queue for queue in queues if self._has_head(queue)]
        if not candidates:
            return None
        self._turns_count -= 1
        retired = next((queue for queue in candidates if queue.worth is RETIRED), None)
        return heappop((retired or self._policy.first(candidates, queues, now_s)).turns)[2]

    def put_back(self, entry: Entry) -> None:
        """Gives an entry its turn again, before all that came later."""
        heappush(entry.queue.turns, (entry.used_s, entry.ticket, entry))
        self._turns_count += 1

    def _worth(self, entry: Entry) -> Worth:
        return RETIRED if entry.is_retired else self._policy.worth(entry)

    def _queue(self, worth: Worth) -> Queue:
        queue = self._queues.get(worth)
        if queue is None:
            queue = self._queues[worth] = Queue(worth)
        return queue

    def _has_head(self, queue: Queue) -> bool:
        """True if there is a valid turn; removes the stale ones before it."""
        while queue.turns:
            _, ticket, entry = queue.turns[0]
            if entry.ticket == ticket:
                if self._is_evictable(entry):
                    return True
                self._withdraw(entry)
            heappop(queue.turns)
            self._turns_count -= 1
        if not queue.held_bytes:
            del self._queues[queue.worth]
        return False

    def _withdraw(self, entry: Entry) -> None:
        if entry.ticket:
            entry.ticket = 0
            self._tickets_count -= 1

    def _clean(self) -> None:
        for queue in self._queues.values():
            queue.turns = [turn for turn in queue.turns if turn[2].ticket == turn[1]]
            heapify(queue.turns)
        self._turns_count = sum(len(queue.turns) for queue in self._queues.values())
