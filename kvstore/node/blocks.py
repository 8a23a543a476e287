"""Engine-hashed blocks: opaque bytes under the engine's own keys, for connectors that hash blocks themselves.

Kept apart from chunks because nothing is known of a block's parents: presence is looked up one by one, and order means
nothing when they are written.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstore.address import Address, block_address
from kvstore.buffers import Borrowed
from kvstore.errors import KVStoreError
from kvstore.format.header import expected_block
from kvstore.hints import DEFAULT, Hints
from kvstore.namespace import Namespace
from kvstore.node.chunks import Chunks
from kvstore.node.counters import Counters
from kvstore.node.deadline import Deadline
from kvstore.node.lanes import DeadlinePassed, Lanes
from kvstore.node.reading import read_chunks
from kvstore.node.refresh import Refresher
from kvstore.node.view import View


class Blocks:
    """Blocks of all namespaces, as one node sees them."""

    def __init__(self, chunks: Chunks, view: View, lanes: Lanes, refresher: Refresher, counters: Counters) -> None:
        self._chunks = chunks
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
    ) -> list[bool]:
        """Stores each buffer under its key; True where a block of that key and size is in the store now.

        False where one of another size is, or a sweep is taking it. Raises Overloaded while the root is full, and what
        the root raised, after which some blocks may be stored.
        """
        self._view.check_room()
        stored = [False] * len(keys)
        given_up = threading.Event()
        lacking: set[int] = set()

        def work(index: int) -> bool:
            expected = expected_block(namespace, keys[index], len(buffers[index]))
            if self._view.condemns(expected.address):
                return True
            found = self._chunks.look(expected)
            if found is not None:
                if self._chunks.lacks(found, hints):
                    lacking.add(index)
                self._counters.add("chunks_found")
                stored[index] = True
                return True
            staged = self._chunks.stage(expected, [buffers[index]], durable, hints)
            if given_up.is_set():
                # Given up while the bytes were being written: they may have changed since, so they get no name.
                self._chunks.discard(staged)
                return False
            try:
                # Another writer's block under this key may have another size; then ours is not what is stored.
                stored[index] = self._chunks.publish(staged, durable) or self._chunks.is_present(expected)
            except KVStoreError:
                self._chunks.discard(staged)
                raise
            return True

        try:
            self._lanes.each(len(keys), work, deadline)
        except DeadlinePassed:
            given_up.set()
            raise
        addresses = _addresses(namespace, keys)
        self._refresher.used(namespace.id, addresses, chained=False, hints=hints, lacking=frozenset(lacking))
        return stored

    def match(self, namespace: Namespace, keys: Sequence[bytes], deadline: Deadline) -> int:
        """How many leading keys are in the store, whatever the size of their blocks."""
        addresses = _addresses(namespace, keys)
        addresses = addresses[: self._view.leading(addresses)]
        quantum = self._chunks.quantum()
        known = self._chunks.known.leading_count(addresses, quantum)

        def read(index: int, _: Borrowed) -> bool:
            address, epoch = addresses[known + index], self._chunks.known.epoch
            present = self._chunks.root.stat(self._chunks.name(address, namespace.id)) is not None
            if present:
                self._chunks.known.add(address, quantum, renewed=False, epoch=epoch)
            return present

        found = read_chunks(self._lanes, self._counters, len(addresses) - known, read, deadline)
        first_miss = found.find(0)
        return len(addresses) if first_miss < 0 else known + first_miss

    def get(
        self, namespace: Namespace, keys: Sequence[bytes], buffers: Sequence[memoryview], deadline: Deadline
    ) -> list[bool]:
        """Reads each block into its buffer, which must have the block's size; False is a miss."""

        def read(index: int, borrowed: Borrowed) -> bool:
            expected = expected_block(namespace, keys[index], len(buffers[index]))
            if self._view.condemns(expected.address):
                return False
            return self._chunks.read(expected, [buffers[index]], borrowed)

        done = read_chunks(self._lanes, self._counters, len(keys), read, deadline, stop_at_miss=False)
        hits = [key for key, hit in zip(keys, done, strict=True) if hit]
        self._refresher.used(namespace.id, _addresses(namespace, hits), chained=False)
        return [bool(each) for each in done]


def _addresses(namespace: Namespace, keys: Sequence[bytes]) -> tuple[Address, ...]:
    return tuple(block_address(namespace, key) for key in keys)
