"""All that a node has above the root: its memory, the tiers that memory is filled from, and the queue behind it.

Apart from the node, which has none of it where it was given no memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvstore.address import Chain
from kvstore.background import Loop
from kvstore.buffers import Sections
from kvstore.census.selection import ClearOrder
from kvstore.census.standing import Standing
from kvstore.counts import NodeCount
from kvstore.errors import Overloaded, Unavailable
from kvstore.hints import Hints
from kvstore.memory.arena import Arena
from kvstore.memory.inventory import Entry
from kvstore.namespace import NamespaceDigest
from kvstore.node.counters import Counters
from kvstore.node.disk_tier import DiskTier
from kvstore.node.encoded import Encodings
from kvstore.node.lanes import Deadline, Lanes
from kvstore.node.limits import CurrentLimits
from kvstore.node.memory_puts import Kept, MemoryPuts, Room
from kvstore.node.memory_tier import MemoryTier
from kvstore.node.settings import TierSettings
from kvstore.node.tiers import Tier
from kvstore.node.wanted import Wanted, image_bytes
from kvstore.node.write_behind import Publish, WriteBehind
from kvstore.sources import Clock, Ids
from kvstore.writes import WriteMode

DEMOTE_PERIOD_S = 0.2
DEMOTE_STEP_BYTES = 64 << 20
FORGET_S = 5.0
FREE_SHARE = 1 / 16
"""With a local disk below it, so much of memory is kept free, so that what goes can be written there before."""


class TierStack:
    """Takes ``arena`` over. Thread-safe."""

    def __init__(
        self,
        arena: Arena,
        settings: TierSettings,
        counters: Counters,
        limits: CurrentLimits,
        clock: Clock,
        ids: Ids,
        *,
        waits: bool,
        incarnations: Ids,
        record: Callable[[], None],
        encodings: Encodings,
        lanes: Lanes | None = None,
    ) -> None:
        """``start`` it before anything comes in.

        ``incarnations`` gives those of the images made here; ``record`` has it said on the root whose they are, soon,
        whether or not a put brings them there.
        """
        now = limits.now
        self._limits = limits
        self.settings = settings
        self.memory = MemoryTier(arena, counters, clock)
        self.disk: DiskTier | None = None
        self.below: list[Tier] = []
        """Peers, then the local disk."""
        self._waits = waits
        self._clock = clock
        self._ids = ids
        self._counters = counters
        self.copiers = lanes or Lanes(now.width, now.width, now.queue_max, now.stall_s, clock)
        """Lanes that never wait for a device: so memory is read while the root hangs."""
        self._record = record
        self.encodings = encodings
        self._puts = MemoryPuts(self.memory, self.copiers, incarnations)
        self.run_bytes = self._puts.run_bytes
        """Size of a run for which ``room`` should be asked."""
        self.behind = WriteBehind(self.memory, counters, limits, clock)
        self._changed = threading.Condition()  # guards that chunks came into memory
        self._is_filled = False
        self._demoting = Loop("kvstore-demote", self._changed, lambda: self._turn)

    def start(self, publish: Publish) -> None:
        """Has ``publish`` write to the root what is put behind."""
        self.behind.start(publish)

    def add_disk(self, folder: str, size_bytes: int) -> None:
        """Puts a local disk below the memory. Raises InvalidRequest, PermissionDenied, Unavailable."""
        disk = self.disk = DiskTier(
            folder, size_bytes, self._counters, self._clock, self._ids, encodings=self.encodings
        )
        disk.open()
        self.below.append(disk)
        self._demoting.start()

    def add_peers(self, peers: Tier) -> None:
        """Puts other nodes' memory between ours and the disk."""
        self.below.insert(0, peers)

    def mode(self, asked: WriteMode | None) -> WriteMode:
        """How a put is done here."""
        mode = asked or self.settings.write
        return WriteMode.THROUGH if self._waits and mode is WriteMode.BEHIND else mode

    def keep(self, wanted: Wanted, first: int, count: int, source: Sections, hints: Hints, deadline: Deadline) -> Kept:
        """Copies chunks that the root has into memory as well, as far as there is room and time."""
        self.filling(wanted)
        try:
            return self._puts.keep(wanted, first, count, source, hints, deadline)
        except (Overloaded, Unavailable):
            return Kept([False] * count, [])  # too late; they are stored all the same

    def absorb(
        self,
        wanted: Wanted,
        first: int,
        count: int,
        source: Sections,
        hints: Hints,
        deadline: Deadline,
        *,
        waits: bool,
    ) -> Kept:
        """Copies chunks into memory that are written to the root later (rule W1); fewer where there is no room.

        With ``waits``, waits for the queue to have room, at most ``behind_wait_s``.
        """
        self.filling(wanted)
        kept = self._absorb(wanted, first, count, source, hints, deadline)
        patience = Deadline(self._clock, min(deadline.left_s(), self._limits.now.behind_wait_s))
        while (
            waits
            and (at := kept.waits_at) is not None
            and self.behind.wait_for_room(image_bytes(wanted, first + at), patience.left_s())
        ):
            kept = kept.then(at, self._absorb(wanted, first + at, count - at, source, hints, deadline))
        self._record()
        return kept

    def _absorb(
        self, wanted: Wanted, first: int, count: int, source: Sections, hints: Hints, deadline: Deadline
    ) -> Kept:
        kept = self._puts.keep(wanted, first, count, source, hints, deadline, self.behind)
        if kept.fresh:
            # From the first that is fresh on: its parents are on the root, or in the queue before it.
            start, stop = first + kept.fresh[0], first + kept.fresh[-1] + 1
            size_bytes = sum(image_bytes(wanted, first + at) for at in kept.fresh)
            self.behind.add(_leading(wanted, stop), start, stop - start, hints, size_bytes)
        return kept

    def room(self, wanted: Wanted, first: int, count: int, hints: Hints) -> Room | None:
        """Claims room for a whole run that is on its way, for ``fill`` or ``give_up``; as ``absorb`` does."""
        self.filling(wanted)
        return self._puts.room(wanted, first, count, hints, self.behind)

    def fill(self, room: Room) -> None:
        """Makes the chunks of a room, whose sections are in place, ready; they are written to the root later."""
        count, size_bytes = len(room.slots), room.size_bytes
        self._puts.fill(room)
        self.behind.add(_leading(room.wanted, room.first + count), room.first, count, room.hints, size_bytes)
        self._record()

    def give_up(self, room: Room) -> None:
        """Gives back room that was not filled. Nobody may be writing into it."""
        if room.slots:
            self._puts.give_up(room)

    def filling(self, wanted: Wanted) -> None:
        """Chunks are about to come into memory: where there is little room, some are demoted meanwhile."""
        self.encodings.learn(wanted.namespace)
        if self.disk is not None and self.memory.free_bytes < self.memory.size_bytes * FREE_SHARE:
            with self._changed:
                self._is_filled = True
                self._changed.notify_all()

    def drop_namespace(self, digest: NamespaceDigest) -> None:
        """Forgets all chunks of a namespace, as after ``clear``."""
        self.behind.forget(digest, FORGET_S)
        self.memory.drop_namespace(digest)
        for tier in self.below:
            tier.drop_namespace(digest)
        # A read may have brought some from there since; one that claims room from now on finds none there.
        self.memory.drop_namespace(digest)

    def drop_ordered(self, orders: Sequence[ClearOrder], standing: Standing) -> bool:
        """Drops from memory what orders name, and keeps it from coming back there from below (rule P6).

        False where something is still being written to the root that may be named by them.
        """
        if self.disk is not None:
            self.disk.forbid(standing)
        self.memory.drop_ordered(orders, standing)
        # What waited to be written finds its images gone; what is being written has read them already.
        return self.behind.pass_by(FORGET_S)

    def sweep_disk(self, orders: Sequence[ClearOrder]) -> None:
        """Removes from the local disk what orders name: as long as that takes, since what is read from there is looked
        at. Never raises KVStoreError.
        """
        if self.disk is not None:
            self.disk.drop_ordered(orders)

    def stats(self) -> dict[str, int | float]:
        """Gauges of all tiers."""
        found: dict[str, int | float] = {
            **self.memory.stats(),
            "behind_bytes": self.behind.size_bytes,
            "behind_bytes_max": self.behind.bytes_max,
        }
        for tier in self.below:
            found.update(tier.stats())
        return found

    def close(self, timeout_s: float) -> None:
        """Writes what the root does not have yet, for at most ``flush_s`` (rule W3), and ends everything."""
        self.behind.close()
        self._demoting.close(timeout_s)
        for tier in self.below:
            tier.close(timeout_s)
        self.copiers.close(timeout_s)
        self.memory.close()

    def _turn(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_filled or self._demoting.closed, DEMOTE_PERIOD_S)
            self._is_filled = False
        self.demote_once()

    def demote_once(self) -> None:
        """Keeps some of memory free, writing what goes to the local disk before, if it was used more than once."""
        assert self.disk is not None
        wanted = int(self.memory.size_bytes * FREE_SHARE) - self.memory.free_bytes
        while wanted > 0 and not self._demoting.closed:
            with self.memory.victims(min(wanted, DEMOTE_STEP_BYTES)) as victims:
                if not victims.entries:
                    return
                for entry, image in victims.images():
                    self.demote(entry, image)
                    wanted -= entry.size_bytes
                self.memory.evict(victims.entries)

    def demote(self, entry: Entry, image: memoryview) -> None:
        """Writes a chunk that memory is about to give up to the local disk, if it was used more than once."""
        assert self.disk is not None
        if entry.uses >= 1 and self.disk.add(self.memory.place(entry), image, entry.hints):
            self._counters.add(NodeCount.MEMORY_DEMOTED)
            if entry.is_gone:
                # Cleared meanwhile: memory was told before the disk, and both perhaps before this came to the disk.
                self.disk.drop(entry.address)


def _leading(wanted: Wanted, count: int) -> Wanted:
    """Without what is behind, which a queue must not keep alive."""
    return wanted.leading(count) if isinstance(wanted, Chain) else wanted
