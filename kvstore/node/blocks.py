"""Engine-hashed blocks: opaque bytes under the engine's own keys, for connectors that hash blocks themselves.

Kept apart from chunks because nothing is known of a block's parents: presence is looked up one by one, and order means
nothing when they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.address import block_addresses
from kvstore.buffers import Borrowed
from kvstore.counts import NodeCount
from kvstore.errors import KVStoreError
from kvstore.format.header import Incarnation, expected_block, incarnation_at
from kvstore.hints import DEFAULT, Hints
from kvstore.namespace import Namespace
from kvstore.native import library as native
from kvstore.node.chunks import Chunks, Staged
from kvstore.node.counters import Counters
from kvstore.node.deadline import Deadline
from kvstore.node.lanes import Lanes, moved_on
from kvstore.node.publish import put_sizes
from kvstore.node.reading import read_chunks, remembered
from kvstore.node.refresh import Refresher
from kvstore.node.shared_runs import SharedPut
from kvstore.node.slots import Slots
from kvstore.node.stack import TierStack
from kvstore.node.tiered import TieredReads
from kvstore.node.view import View
from kvstore.node.wanted import Keyed, payload_of
from kvstore.root.interface import Stat
from kvstore.sections import Buffers
from kvstore.waiting import Flag
from kvstore.writes import WriteMode

AllStillRight = Callable[[Sequence[int]], Sequence[bool] | npt.NDArray[np.bool_]]
"""``publish.StillRight`` of several blocks at once, by their places among the keys."""


def vouched(places: Sequence[int]) -> Sequence[bool]:
    """Of bytes that the caller vouches for."""
    return [True] * len(places)


class Blocks:
    """Blocks of all namespaces, as one node sees them."""

    def __init__(
        self,
        chunks: Chunks,
        view: View,
        lanes: Lanes,
        refresher: Refresher,
        counters: Counters,
        reads: TieredReads,
        tiers: TierStack | None,
    ) -> None:
        self._chunks = chunks
        self._reads = reads
        self._tiers = tiers
        self._view = view
        self._refresher = refresher
        self._lanes = lanes
        self._counters = counters

    def put(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        deadline: Deadline,
        durable: bool,
        hints: Hints = DEFAULT,
        write: WriteMode | None = None,
    ) -> list[bool]:
        """Stores each buffer under its key; True where a block of that key and size is in the store now.

        False where one of another size is, a sweep is taking it, or, put behind, memory has no room for it. Raises
        Overloaded while the root is full, and what the root raised, after which some blocks may be stored.
        """
        self._view.check_room()
        tiers = self._tiers
        mode = tiers.mode(write, hints) if tiers is not None and keys else WriteMode.AROUND
        if tiers is None or mode is WriteMode.AROUND:
            return self._put_on_root(namespace, keys, buffers, deadline, durable, hints)
        keyed = Keyed(namespace, keys, block_addresses(namespace, keys), [len(buffer) for buffer in buffers])
        if mode is WriteMode.THROUGH:
            stored = self._put_on_root(namespace, keys, buffers, deadline, durable, hints)
            if all(stored):
                tiers.keep(keyed, 0, len(keys), lambda index: [buffers[index]], hints, deadline)
            return stored
        return self._put_behind(tiers, keyed, buffers, deadline, hints)

    def publish(self, keyed: Keyed, slots: Slots, hints: Hints, deadline: Deadline, durable: bool) -> int:
        """Writes blocks from memory to the root; returns how many leading ones are there, or in memory no more."""
        assert self._tiers is not None
        memory, stop = self._tiers.memory, slots.first + len(slots.entries)
        there = range(slots.first, stop)
        right = memory.all_still_right(slots, there)
        images = {index: slots.images(index, index + 1)[0] for index in there if right[index - slots.first]}
        payloads = {index: payload_of(keyed, index, image) for index, image in images.items()}
        if not payloads:
            return stop
        keys = [keyed.keys[index] for index in payloads]
        indexes = [*payloads]
        stored = self._put_on_root(
            keyed.namespace, keys, [*payloads.values()], deadline, durable, hints,
            lambda places: memory.all_still_right(slots, [indexes[at] for at in places]),
            [incarnation_at(image) for image in images.values()],
        )  # fmt: skip
        left = (index for index, done in zip(payloads, stored, strict=True) if not done)
        return next(left, stop)

    def _put_behind(
        self, tiers: TierStack, keyed: Keyed, buffers: Sequence[memoryview], deadline: Deadline, hints: Hints
    ) -> list[bool]:
        """Into memory, from where they are written later; what is there, or known to be on the root, is only used."""
        known, quantum = self._chunks.known, self._chunks.quantum()
        condemned = [self._view.condemns(address) for address in keyed.addresses]
        with tiers.memory.refer(keyed, 0, len(keyed)) as slots:
            stored = [
                not gone and (entry is not None or known.is_present(address, quantum))
                for address, entry, gone in zip(keyed.addresses, slots.entries, condemned, strict=True)
            ]
        found = [at for at, there in enumerate(stored) if there]
        new = [at for at, there in enumerate(stored) if not there and not condemned[at]]
        if new:
            wanted = keyed.picked(new)
            kept = tiers.absorb(wanted, 0, len(new), lambda index: [buffers[new[index]]], hints, deadline)
            for at, there in zip(new, kept.there, strict=True):
                stored[at] = there
        if found:
            raised = hints if hints != DEFAULT else None
            wanted = keyed.picked(found)
            lacking = frozenset(range(len(found))) if raised else frozenset[int]()
            tiers.memory.used(wanted, len(found), raised)
            self._refresher.used(
                keyed.namespace.id, tuple(wanted.addresses), chained=False, hints=hints, lacking=lacking
            )
        return stored

    def _put_on_root(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        deadline: Deadline,
        durable: bool,
        hints: Hints,
        still_right: AllStillRight = vouched,
        origins: Sequence[Incarnation] = (),
    ) -> list[bool]:
        """``origins``: of the images that the blocks are from, if they are; as for ``Chunks.stage``."""
        stored = [False] * len(keys)
        given_up = Flag()
        lacking: set[int] = set()

        def found_there(index: int, found: Stat) -> bool:
            if self._chunks.lacks(found, hints):
                lacking.add(index)
            self._counters.add(NodeCount.CHUNKS_FOUND)
            stored[index] = True
            return True

        def work(index: int) -> bool:
            expected = expected_block(namespace, keys[index], len(buffers[index]))
            if self._view.condemns(expected.address):
                return True
            found = self._chunks.look(expected)
            if found is not None:
                return found_there(index, found)
            origin = origins[index] if origins else None
            staged = self._chunks.stage(expected, [buffers[index]], durable, hints, origin)
            return publish(index, staged, bool(still_right([index])[0]))

        def publish(index: int, staged: Staged, is_right: bool) -> bool:
            if given_up.is_set():
                # Given up while the bytes were being written: they may have changed since, so they get no name.
                self._chunks.discard(staged)
                return False
            if not is_right:
                self._chunks.discard(staged)
                return True
            try:
                # Another writer's block under this key may have another size; then ours is not what is stored.
                stored[index] = self._chunks.publish(staged, durable) or self._chunks.is_present(staged.expected)
            except KVStoreError:
                self._chunks.discard(staged)
                raise
            return True

        addresses = block_addresses(namespace, keys)
        run = (
            self._chunks.runs.of(
                Keyed(namespace, keys, addresses, list(map(len, buffers))), 0, len(keys), Buffers(buffers)
            )
            if self._chunks.runs.stages
            else None
        )
        if run is not None:
            run.origins = dict(enumerate(origins))

        def alone(put: SharedPut, index: int) -> Staged:
            expected = expected_block(namespace, keys[index], len(buffers[index]))
            return Staged(put.name(index), expected, expected.file_bytes)

        def work_on_turns(put: SharedPut, _: int) -> bool:
            more = True
            left: list[int] = []
            while more and not given_up.is_set():
                try:
                    places, more = self._chunks.runs.stage(put)
                    left = places.tolist()
                    right = still_right(left)
                    swept = self._view.leading([addresses[index] for index in left]) < len(left)
                    if all(right) and not swept and not given_up.is_set():
                        self._chunks.runs.publish(put, places, ordered=False)
                    for index, status, is_right in zip(places.tolist(), put.statuses(places), right, strict=True):
                        left.remove(index)
                        if status == native.PUBLISHED:
                            stored[index] = True
                            continue
                        is_swept = swept and self._view.condemns(addresses[index])
                        if status == native.DONE:
                            publish(index, alone(put, index), bool(is_right) and not is_swept)
                        elif status != native.FOUND:
                            work(index)
                        elif not is_swept:
                            found_there(index, put.stat(index))
                except BaseException:
                    put.stop()
                    raise
                finally:
                    for index, status in zip(left, put.statuses(left), strict=True):
                        if status == native.DONE:
                            self._chunks.discard(alone(put, index))
                moved_on()
            return not given_up.is_set()

        try:
            if run is None:
                self._lanes.each(len(keys), work, deadline)
            else:
                sizes = put_sizes(sum(map(len, buffers)) // len(keys), durable)
                put = self._chunks.runs.shared_put(run, sizes, depths=False, durable=durable, hints=hints)
                self._lanes.each(min(len(keys), self._lanes.width), partial(work_on_turns, put), deadline)
        except BaseException:
            # Past the deadline, or interrupted (Ctrl-C): lanes may still be at it.
            given_up.set()
            raise
        self._refresher.used(namespace.id, tuple(addresses), chained=False, hints=hints, lacking=frozenset(lacking))
        return stored

    def match(self, namespace: Namespace, keys: Sequence[bytes], deadline: Deadline) -> int:
        """How many leading keys are in the store, whatever the size of their blocks."""
        addresses = block_addresses(namespace, keys)
        addresses = addresses[: self._view.leading(addresses)]
        quantum = self._chunks.quantum()
        known = remembered(self._chunks, Keyed(namespace, keys, addresses, ()), 0, self._reads.above)

        def read(index: int, _: Borrowed) -> bool:
            address, epoch = addresses[known + index], self._chunks.known.epoch
            if self._reads.has(Keyed(namespace, (keys[known + index],), (address,), ()))[0]:
                return True
            self._chunks.settle(address, self._chunks.name(address, namespace.id))
            present = self._chunks.root.stat(self._chunks.name(address, namespace.id)) is not None
            if present:
                self._chunks.known.add(address, quantum, renewed=False, epoch=epoch)
            return present

        found = read_chunks(self._lanes, self._counters, len(addresses) - known, read, deadline)
        first_miss = found.find(0)
        return len(addresses) if first_miss < 0 else known + first_miss

    def present(self, namespace: Namespace, keys: Sequence[bytes], deadline: Deadline) -> list[bool]:
        """Which keys are in the store, each looked for by itself, whatever the size of its block."""
        addresses = block_addresses(namespace, keys)
        known, quantum = self._chunks.known, self._chunks.quantum()
        above = self._reads.has(Keyed(namespace, keys, addresses, ()))
        present = [
            (there or known.is_present(each, quantum)) and not self._view.condemns(each)
            for each, there in zip(addresses, above, strict=True)
        ]
        unknown = [index for index, found in enumerate(present) if not found]

        def look(at: int, _: Borrowed) -> bool:
            address, epoch = addresses[unknown[at]], known.epoch
            if self._view.condemns(address):
                return False
            self._chunks.settle(address, self._chunks.name(address, namespace.id))
            found = self._chunks.root.stat(self._chunks.name(address, namespace.id)) is not None
            if found:
                known.add(address, quantum, renewed=False, epoch=epoch)
            return found

        done = read_chunks(self._lanes, self._counters, len(unknown), look, deadline, stop_at_miss=False)
        for index, found in zip(unknown, done, strict=True):
            present[index] = bool(found)
        return present

    def get(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        deadline: Deadline,
        *,
        held: bool = False,
    ) -> list[bool]:
        """Reads each block into its buffer, which must have the block's size; False is a miss.

        ``held``: under a hold, which a sweep that condemned later waits for.
        """

        wanted = Keyed(namespace, keys, block_addresses(namespace, keys), [len(buffer) for buffer in buffers])
        allowed = range(len(keys)) if held else self._allowed(wanted)
        if len(allowed) < len(keys):
            wanted, buffers = wanted.picked(allowed), [buffers[index] for index in allowed]
        reading = self._reads.begin(wanted, 0, len(wanted), Buffers(buffers), deadline, stop_at_miss=False)
        done = reading.wait(deadline)
        self._reads.used(wanted, len(wanted))
        used = tuple(address for address, hit in zip(wanted.addresses, done, strict=True) if hit)
        self._refresher.used(namespace.id, used, chained=False)
        hits = [False] * len(keys)
        for index, hit in zip(allowed, done, strict=True):
            hits[index] = bool(hit)
        return hits

    def _allowed(self, wanted: Keyed) -> Sequence[int]:
        """Those that no sweep has condemned."""
        if self._view.leading(wanted.addresses) == len(wanted):
            return range(len(wanted))
        return [index for index, address in enumerate(wanted.addresses) if not self._view.condemns(address)]
