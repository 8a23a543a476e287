"""Engine-hashed blocks: opaque bytes under the engine's own keys, for connectors that hash blocks themselves.

The store does not know a block's parents, so it looks up each block by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvstore.core.address import Address
from kvstore.core.buffers import BlockBuffers, BufferLoan
from kvstore.core.executor import Deadline, moved_on
from kvstore.core.metrics import NodeCount
from kvstore.core.namespace import Namespace, NamespaceId
from kvstore.engine.gc_state import ChunkHold
from kvstore.engine.reader import ReadFuture
from kvstore.errors import KVStoreError
from kvstore.format.keyset import BlockKeys, ChunkKeys, leading

if TYPE_CHECKING:
    from kvstore.engine.engine import Engine

LOOKED_MAX = 32
"""Blocks that native code looks for in one call. A root may take long for each: nothing that is found counts before the
call ends, and a thread that is in one call for ``stall_s`` counts as hung.
"""


class Blocks:
    """The blocks of all namespaces, as one node sees them."""

    def __init__(self, node: Engine) -> None:
        self._chunks = node.store
        self._reads = node.reader
        self._view = node.gc_view
        self._executor = node.executor
        self._counters = node.counters
        self._holds = node.holds
        self._refresher = node.refresher

    def match(self, namespace: Namespace, keys: Sequence[bytes], deadline: Deadline) -> int:
        """Returns how many leading keys are in the store, whatever the size of their blocks."""
        asked = BlockKeys.of(namespace, keys)
        wanted = asked.leading(self._view.leading(asked))
        known = self._reads.near(wanted)
        rest = wanted.take(range(known, len(wanted)))
        count = known + leading(bytes(self._look(rest, deadline, prefix=True)))
        self._refresher.used(wanted.leading(count))
        self._counters.add_lookup(len(asked), count, namespace.layout.chunk_tokens, is_match=True)
        return count

    def hold(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        ttl_s: float | None,
        deadline: Deadline,
        *,
        counts: bool = True,
    ) -> tuple[ChunkHold, list[bool]]:
        """Holds the blocks that are in the store, and says for each key whether its block is.

        The hold precedes the lookup (rule H2) and then covers the blocks found. ``counts`` is False for blocks that no
        caller requested.

        Raises Overloaded if too many holds are alive.
        """
        asked = BlockKeys.of(namespace, keys)
        nothing = ChunkKeys.of(namespace, np.empty(0, np.uint32))
        hold = self._holds.take(nothing, ttl_s, whatever=True, asked=b"".join(asked.addresses))
        try:
            present = self._present(asked, deadline, is_match=False, counts=counts)
            hold.found = (asked.take(np.flatnonzero(present).tolist()),)
            return hold, present
        except BaseException:
            self._holds.release(hold)
            raise

    def present(self, namespace: Namespace, keys: Sequence[bytes], deadline: Deadline) -> list[bool]:
        """Returns for each key whether it is in the store, whatever the size of its block."""
        return self._present(BlockKeys.of(namespace, keys), deadline, is_match=True)

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

        ``held`` is True if a hold protects the blocks: a sweep that condemned them later spares them.
        """

        wanted = BlockKeys.of(namespace, keys, [len(buffer) for buffer in buffers])
        allowed = range(len(keys)) if held else self._view.allowed(wanted.addresses)
        if len(allowed) < len(keys):
            wanted, buffers = wanted.take(allowed), [buffers[index] for index in allowed]
        done = self._reads.begin(wanted, 0, len(wanted), BlockBuffers(buffers), deadline).wait(deadline)
        self._reads.used(wanted if all(done) else wanted.take([at for at, hit in enumerate(done) if hit]))
        hits = [False] * len(keys)
        for index, hit in zip(allowed, done, strict=True):
            hits[index] = bool(hit)
        return hits

    def _present(
        self,
        asked: BlockKeys,
        deadline: Deadline,
        *,
        is_match: bool,
        counts: bool = True,
    ) -> list[bool]:
        addresses, namespace = asked.addresses, asked.namespace
        unswept = self._view.unswept(asked)
        present = self._chunks.known.present(addresses, self._chunks.known.quantum())
        present |= np.array(self._reads.has(asked), np.bool_)
        lacking = np.flatnonzero(unswept & ~present)
        present[lacking] = self._look(asked.take(lacking.tolist()), deadline)
        present &= unswept & self._view.unswept(asked)  # exclude blocks condemned during the lookup
        found_at: list[int] = np.flatnonzero(present).tolist()
        # What an engine has itself it does not read: renewed only with reads, a prompt's first blocks would go first.
        self._refresher.used(asked.take(found_at))
        if counts:
            self._counters.add_lookup(len(asked), len(found_at), namespace.layout.chunk_tokens, is_match=is_match)
        there: list[bool] = present.tolist()
        return there

    def _look(self, wanted: BlockKeys, deadline: Deadline, *, prefix: bool = False) -> list[bool]:
        """Returns which blocks the root has, whatever their size; condemned ones count as absent (rule H1).

        What cannot be looked at in time is a miss. For a ``prefix``, blocks nearer than the root are there too, and
        those behind a miss may count as misses.
        """
        count = len(wanted)
        run = self._chunks.run(wanted, 0, count)
        parts = _parts(count, self._executor.width, growing=prefix) if run is not None else _parts(count, count)
        found = [False] * count

        def look(number: int, _: BufferLoan) -> bool:
            part, epoch = parts[number], self._chunks.known.epoch
            picked = wanted.take(part)
            there = np.array(self._reads.has(picked), np.bool_) if prefix else np.zeros(len(part), np.bool_)
            unswept = self._view.unswept(picked)
            left: Sequence[int] = part
            if run is not None and unswept.all():
                on_root, left = run.present(part.start, part.stop, epoch)
                there |= on_root
            found[part.start : part.stop] = (there & unswept).tolist()
            for at in left:
                address = wanted.addresses[at]
                found[at] = found[at] or (
                    not self._view.condemns(address) and self._is_on_root(address, wanted.namespace.id)
                )
                moved_on()
                if prefix and not found[at]:
                    break
            return all(found[part.start : part.stop])

        ReadFuture(self._executor, self._counters, len(parts), look, stop_at_miss=prefix).wait(deadline)
        return found.copy()  # a thread past its deadline may go on

    def _is_on_root(self, address: Address, namespace: NamespaceId) -> bool:
        """True if the root has a block, whatever its size, that some node may be able to read."""
        chunks, name = self._chunks, self._chunks.name(address, namespace)
        epoch = chunks.known.epoch
        try:
            if address in chunks.suspects:
                chunks.settle(address, name)
            found = chunks.root.stat(name) is not None
        except KVStoreError:
            self._counters.add(NodeCount.MISS_UNREADABLE)
            return False
        if found:
            chunks.known.add(address, chunks.known.quantum(), renewed=False, epoch=epoch)
        return found


def _parts(count: int, width: int, *, growing: bool = False) -> list[range]:
    """Returns the blocks that are looked for together, by ``width`` threads.

    If the parts are ``growing``, the first ones have a block each, because nothing behind a miss is worth a look.
    """
    parts, start = list[range](), 0
    while start < count:
        size = 1 << len(parts) // width if growing else -(-count // width)
        parts.append(range(start, min(start + min(size, LOOKED_MAX), count)))
        start = parts[-1].stop
    return parts
