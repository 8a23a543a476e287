"""A node: what a worker serves, and what an engine has in its own process when it opens the root itself.

It joins the parts of this package and gives every call its deadline.  No call here touches etcd.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy.typing as npt

from kvstore.census.selection import ClearOrder
from kvstore.codec.codec import KeyFile
from kvstore.codec.encodings import Encodings
from kvstore.core.address import TokenArray
from kvstore.core.buffers import BlockBuffers, Pieces, Sections
from kvstore.core.clock import Clock, Ids, RandomIds, SystemClock
from kvstore.core.executor import Deadline, Executor, moved_on
from kvstore.core.metrics import Counters, NodeCount
from kvstore.core.namespace import Namespace, NamespaceDigest
from kvstore.core.operations import OperationRun, Operations, OperationState
from kvstore.core.recency import DEFAULT, Hints
from kvstore.core.results import LayerMemory, PutResult
from kvstore.core.validate import TierName
from kvstore.core.write_mode import Durability, WriteMode
from kvstore.engine.blocks import Blocks
from kvstore.engine.chunk_store import ChunkStore, PresenceCache, TouchQueue
from kvstore.engine.gc_state import ChunkHold, ClusterGcState, GcState, Holds
from kvstore.engine.layers import LayerReader, MemoryOf
from kvstore.engine.prefetch import Prefetcher
from kvstore.engine.reader import Reader
from kvstore.engine.settings import NO_TIERS, Limits, TierSettings
from kvstore.engine.writer import Writer, WriteResult
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.format import places
from kvstore.format.header import Ancestry
from kvstore.format.keyset import BlockKeys, ChunkKeys, RecentChains, leading
from kvstore.meta.keys import Keys
from kvstore.root.identity import NamespaceRecords, RootIdentity, read_identity, read_namespaces
from kvstore.root.interface import Root, StorageSpace
from kvstore.root.posix import PosixRoot
from kvstore.tiers.arena import SealedArena
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.stack import TierStack

# The staging folders of one node: that of its session, and those of its earlier sessions.


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
        self._before.append(session)

    def clear(self, executor: Executor, timeout_s: float) -> None:
        """Removes, at the node's end, staged files that it will not publish, and its folders if they are empty.

        Waits for ``timeout_s``, and longer while files are being removed. Never raises KVStoreError: a collector or
        ``fsck`` later clears what stays on a root that hangs or refuses.
        """
        try:
            batch = executor.start(1, lambda _: self._clear())
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
                # It belongs to a put that was cut off. If that put still runs, it finds its file deleted and fails.
                self._root.discard(places.Name(f"{folder}/{entry.name}"))
                self._looked_at_count += 1
                moved_on()
            self._root.remove_folder(folder)
        return True


T = TypeVar("T")

_ENDED = {
    OperationState.DONE: NodeCount.OPERATIONS_DONE,
    OperationState.FAILED: NodeCount.OPERATIONS_FAILED,
    OperationState.CANCELLED: NodeCount.OPERATIONS_CANCELLED,
}


class Engine:
    """The chunks of one root, looked for, read, written and held. Thread-safe.

    Every method returns or raises within its deadline (``deadline_s`` where given, else the limit's).
    """

    def __init__(
        self,
        root: Root,
        identity: RootIdentity,
        *,
        session: Callable[[], bytes] | None = None,
        durability: Durability = Durability.NONE,
        limits: Limits | None = None,
        clock: Clock | None = None,
        ids: Ids | None = None,
        arena: SealedArena | None = None,
        settings: TierSettings = NO_TIERS,
        keys: KeyFile | None = None,
        compress: bool = False,
        gc_state: Callable[[PresenceCache, Counters], GcState] | None = None,
    ) -> None:
        """``keys`` (loaded) say whose chunks are encrypted, ``compress`` applies to all.

        ``gc_state`` makes what the node asks of garbage collection; by default the view of a cluster.
        ``arena`` is open, and closed with the node; without one there are no tiers, whatever ``settings`` say.
        """
        self.root = root
        self.identity = identity
        limits = limits or Limits()
        self.limits = limits
        """What the node allows itself now."""
        self.clock = clock = clock or SystemClock()
        self.ids = ids = ids or RandomIds()
        self.id = ids.fresh()
        self.durability = durability
        self.counters = Counters()
        self.executor = Executor(limits.io_threads, limits.width, limits.queue_max, limits.stall_s, clock)
        self.known = PresenceCache(limits.known_max, limits.quantum_s, clock)
        self.chains = RecentChains(limits.chains_bytes_max)
        if gc_state is None:
            gc_state = partial(ClusterGcState, Keys(identity.root))
        self.gc_view = gc_state(self.known, self.counters)
        numbers = itertools.count()
        self._session = session = session or (lambda: self.id)
        self.encodings = Encodings(keys, self.counters, ids, compress=compress)
        self.store = ChunkStore(self, session, numbers)
        self._records = NamespaceRecords(root, ids, clock)
        self.staging = Staging(root, session)
        self.refresher = TouchQueue(self.store, self.counters, limits.refresh_queue_max)
        self.holds = Holds(self.gc_view, limits, self.counters, clock, ids, self.refresher.used)
        self.tiers: TierStack | None = None
        """Memory and what goes with it; None where this node has none."""
        if arena is not None:
            self.tiers = TierStack(self, arena, settings)
        self.reader = Reader(self)
        self.blocks = Blocks(self)
        self.writer = Writer(self)
        self._prefetcher: Prefetcher | None = None
        self.operations = Operations(
            clock, ids, lambda: self.limits.operations_max, lambda state: self.counters.add(_ENDED[state])
        )
        if self.tiers is not None:
            self._prefetcher = Prefetcher(self, self.tiers)
        self._closed = False

    # Namespaces

    def claim_namespace(self, namespace: Namespace) -> None:
        """Claims the namespace's name on the root for its layout. Raises LayoutMismatch, or what the root raised."""
        self.on_root(lambda: self._records.claim(namespace))

    def check_namespace(self, namespace: Namespace) -> None:
        """Raises LayoutMismatch where the root has the name with another layout; claims nothing."""
        self.executor.run(lambda: self._records.check(namespace), self._deadline(None, self.limits.read_deadline_s))

    def find_namespace(self, digest: NamespaceDigest) -> Namespace | None:
        """The namespace with this digest, if it was ever used on this root."""
        return self.executor.run(lambda: self._records.find(digest), self._deadline(None, self.limits.read_deadline_s))

    def namespaces(self, deadline_s: float | None = None) -> list[Namespace]:
        """All namespaces recorded on the root."""
        return self.executor.run(
            lambda: read_namespaces(self.root), self._deadline(deadline_s, self.limits.read_deadline_s)
        )

    # Prefixes

    def match(self, chain: ChunkKeys, deadline_s: float | None = None, *, counts: bool = True) -> int:
        """How many leading chunks are in the store. A miss, never an error, when the root does not answer."""
        deadline = self._deadline(deadline_s, self.limits.match_deadline_s)
        count = self.reader.matched_count(chain.leading(self.gc_view.leading(chain)), deadline)
        if counts:
            self.counters.add_lookup(len(chain), count, chain.namespace.layout.chunk_tokens, is_match=True)
        return count

    def hold(
        self,
        chain: ChunkKeys,
        ttl_s: float | None = None,
        deadline_s: float | None = None,
        *,
        counts: bool = True,
    ) -> ChunkHold:
        """Holds the leading chunks that are in the store. Raises Overloaded where too many holds are alive."""
        hold = self.holds.take(chain, ttl_s)  # it has left out what is condemned
        try:
            hold.count = self.reader.matched_count(hold.chain, self._deadline(deadline_s, self.limits.match_deadline_s))
            if counts:
                self.counters.add_lookup(len(chain), hold.count, chain.namespace.layout.chunk_tokens, is_match=False)
            hold.chain = chain.leading(hold.count)
            if self.memory is not None:
                self.holds.keep(hold, self.memory.refer(hold.chain, 0, hold.count))
        except BaseException:
            self.holds.release(hold)
            raise
        return hold

    def read(self, hold: ChunkHold, into: Callable[[int], Pieces], deadline_s: float | None = None) -> int:
        """Reads held chunks into ``into(index)``, their sections in order; returns how many leading ones are good.

        What lies behind them in the caller's memory is undefined, and not touched after this returns.
        Raises HoldBroken where the hold has ended.
        """
        self.holds.check(hold)
        deadline = self._deadline(deadline_s, self.limits.read_deadline_s)
        self.counters.add(NodeCount.REQUESTS_GET)
        done = self.reader.begin(hold.chain, 0, hold.count, into, deadline).wait(deadline)
        count = leading(done)
        self.reader.used(hold.chain.leading(count))
        return count

    @property
    def memory(self) -> MemoryTier | None:
        """The chunks in memory; None where this node has none."""
        return self.tiers.memory if self.tiers is not None else None

    @property
    def hands_files(self) -> bool:
        """Whether chunks are files that can be handed to another process of this host."""
        return isinstance(self.root, PosixRoot)

    def read_layers(
        self, hold: ChunkHold, memory: MemoryOf, deadline_s: float | None = None, band: int = 1
    ) -> Generator[tuple[int, LayerMemory]]:
        """Yields each layer once all held tokens of it are in ``memory(layer)``, the next being read then.

        ``deadline_s`` is for each band. Raises HoldBroken where a chunk was lost or the hold has ended.
        """
        self.holds.check(hold)
        if not hold.count:
            return
        self._bring_foreign(hold, self._deadline(deadline_s, self.limits.read_deadline_s))
        reader = LayerReader(self, hold.chain, hold.count, band)
        for layer, filled in reader.read(memory, partial(self._deadline, deadline_s, self.limits.read_deadline_s)):
            self.holds.check(hold)
            yield layer, filled
        self.reader.used(hold.chain)

    def view(self, hold: ChunkHold, deadline_s: float | None = None) -> list[npt.NDArray[Any]]:
        """The held chunks as read-only arrays of shape ``(layers, 2, chunk_tokens, kv_heads, head_dim)``.

        Without a copy if they are in memory, or if native code can map the root, up to the limit of ``reading.c``.
        Verified; fewer than held if one was lost. An array stays readable after the hold ends, and one in memory keeps
        its chunk there. No process may truncate a mapped file: SIGBUS kills a process that touches the lost part, as
        with any mapping.
        """
        self.holds.check(hold)
        self.counters.add(NodeCount.REQUESTS_GET)
        deadline = self._deadline(deadline_s, self.limits.read_deadline_s)
        self._bring_foreign(hold, deadline)
        arrays = self.reader.view(hold.chain, deadline)
        self.reader.used(hold.chain.leading(len(arrays)))
        return arrays

    # Publishing

    def put(
        self,
        chain: ChunkKeys,
        first: int,
        source: Sections,
        deadline_s: float | None = None,
        hints: Hints = DEFAULT,
        write: WriteMode | None = None,
    ) -> PutResult:
        """Stores the chunks from ``first`` on whose parents are there; ``source(index)`` gives their sections.

        Where a chunk before ``first`` is missing nothing is stored, and the result says up to where the store goes.
        On a node with memory ``write`` says when it returns; by default as the node is set.
        Raises Overloaded (no space), PermissionDenied or Unavailable; what was published until then stays.
        """
        deadline = self._deadline(deadline_s, self.limits.write_deadline_s)
        published = self.writer.put(chain, first, source, deadline, hints, write)
        return published.of_prompt(chain.namespace.layout.chunk_tokens)

    def put_blocks(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        deadline_s: float | None = None,
        hints: Hints = DEFAULT,
        write: WriteMode | None = None,
        ancestry: Ancestry | None = None,
    ) -> WriteResult:
        """Stores each buffer under its key; ``there`` where a block of that key and size is in the store now.

        Not where one of another size is, a sweep is taking it, or, put behind, memory has no room. A put behind does
        not look at the root: if that has a block of another size, it counts as there and a read misses. ``ancestry``
        says where in a prompt. Raises Overloaded while the root is full, else what the root raised; some may be stored.
        """
        wanted = BlockKeys.of(namespace, keys, list(map(len, buffers)), ancestry)
        deadline = self._deadline(deadline_s, self.limits.write_deadline_s)
        return self.writer.put(wanted, 0, BlockBuffers(buffers), deadline, hints, write)

    # Ahead of reads

    def begin_prefetch(
        self, chain: ChunkKeys, tier: TierName, identity: str = "", tenant_share: float = 1.0
    ) -> OperationRun:
        """Begins to bring what is stored of a prompt to a tier.

        Raises InvalidRequest where this node has no such tier, and what ``Operations.begin`` raises.
        """
        prefetcher, tiers = self._prefetcher, self.tiers
        if prefetcher is None or tiers is None:
            raise InvalidRequest(
                "prefetch: this node has no memory; start it with --memory SIZE (memory= of kvstore.open)"
            )
        if tier == "disk" and tiers.disk is None:
            raise InvalidRequest(
                "tier='disk': this node has no local disk; start it with --disk FOLDER:SIZE (disk= of kvstore.open)"
            )
        namespace = chain.namespace
        return self.operations.begin(
            "prefetch",
            lambda operation: prefetcher.run(chain, tier, operation),
            about=f"{len(chain)} chunks of {namespace.name} to {tier}",
            unit="tokens",
            identity=identity,
            tenant=namespace.tenant,
            tenant_share=tenant_share,
            deadline_s=self.limits.prefetch_deadline_s,
        )

    def evict_first(self, chain: ChunkKeys) -> None:
        """Makes the chunks of a prompt the first to go from this node's memory and disk, until they are used again."""
        if self.tiers is not None:
            self.tiers.memory.retire(chain, len(chain))
            if self.tiers.disk is not None:
                self.tiers.disk.retire(chain, len(chain))

    # Looking after it

    def on_root(self, work: Callable[[], T]) -> T:
        """Does something with the root on a thread, within the deadline of a write. Raises what it raises."""
        return self.executor.run(work, self._deadline(None, self.limits.write_deadline_s))

    def space(self, deadline_s: float) -> StorageSpace:
        """Returns the free space of the root. Raises Unavailable if the root is silent or gone."""
        return self.executor.run(self._space, self._deadline(None, deadline_s))

    def _space(self) -> StorageSpace:
        found = read_identity(self.root)
        if found is None or found.root != self.identity.root:  # a folder under a mount that ended, say
            raise Unavailable(f"the root at {self.root.url} is gone: mount it again")
        return self.root.space()

    def forget(self) -> None:
        self.known.clear()

    def obey(self, new: Sequence[ClearOrder], orders: Sequence[ClearOrder]) -> bool:
        """Drops what ``new`` orders to clear name from memory and disk, and keeps out what any of ``orders`` names
        (rule P5); what is known to be present is forgotten. False where that is not done yet: call again.
        """
        self.known.clear()
        is_done = self.tiers is None or self.tiers.drop_ordered(new, ClearOrder.of_all(orders))
        self.known.clear()
        return is_done

    def refill(self, cleared: Sequence[ClearOrder]) -> None:
        """Begins to use the local disk, except what orders named while it was away. Call it once."""
        self.known.clear()
        if self.tiers is not None:
            self.tiers.refill(cleared)

    def stats(self) -> dict[str, int | float]:
        return {
            **self.counters.snapshot(),
            "known_chunks": len(self.known),
            "holds": len(self.holds),
            "root_queue": self.executor.waiting_count,
            "root_hangs": int(self.executor.stalled),
            "root_full": int(self.gc_view.is_full),
            "operations_running": self.operations.count(OperationState.RUNNING),
            "operations_waiting": self.operations.count(OperationState.WAITING),
            "native_path": int(self.store.is_native),
            "keys_known": len(self.encodings.ring.by_id),
            **(self.tiers.stats() if self.tiers is not None else {}),
        }

    def drain(self) -> None:
        """Returns when what was put behind is written and all recency is renewed; for orderly shutdown and tests."""
        if self.tiers is not None:
            self.tiers.behind.flush(self.limits.flush_s)
        self.refresher.drain()

    def close(self, timeout_s: float = 2.0) -> None:
        """Ends holds and threads and removes what it staged, if the root answers in time. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.holds.drop_all()
        self.operations.close(timeout_s)
        if self.tiers is not None:
            self.tiers.close(timeout_s)
        self.refresher.close(timeout_s)
        self.staging.clear(self.executor, timeout_s)
        self.executor.close(timeout_s)
        self.root.close()

    def _bring_foreign(self, hold: ChunkHold, deadline: Deadline) -> None:
        """Brings held chunks into memory that the root may not have, for those who read it or memory alone."""
        if self.tiers is not None and self.tiers.below and self.tiers.memory.leading(hold.chain, 0) < hold.count:
            chain, count, reads = hold.chain, hold.count, self.reader
            with suppress(KVStoreError):  # what does not come is missed by the reader
                self.executor.run(
                    lambda: reads.bring(chain, 0, count, deadline, even_once=True, even_root=False), deadline
                )

    def _deadline(self, asked_s: float | None, default_s: float) -> Deadline:
        return Deadline(self.clock, default_s if asked_s is None else asked_s)


# Matches several prompts in one call and within one deadline.


AT_ONCE = 256
"""Prompts that one lookup in the presence cache covers: segments are many and short."""


def match_each(
    node: Engine,
    namespace: Namespace,
    prompts: Iterable[TokenArray],
    deadline_s: float,
) -> list[int]:
    """Returns the number of leading chunks of each prompt; fewer answers if the time runs out.

    Prompts that begin alike should follow one another: what they share is hashed once. They leave out the hit ratio.
    """
    deadline = Deadline(node.clock, deadline_s)
    counts: list[int] = []
    left = iter(prompts)
    while not deadline.passed:
        group = list(islice(left, AT_ONCE))
        if not group:
            break
        chains = [node.chains.of(namespace, tokens) for tokens in group]
        addresses = [address for chain in chains for address in chain.addresses]
        is_calm = node.gc_view.is_calm  # first: what is gone is forgotten then
        present, start = bytes(node.known.present(addresses, node.known.quantum())), 0
        for chain in chains:
            if deadline.passed:
                break
            remembered = leading(present[start : start + len(chain)])
            start += len(chain)
            whole = remembered == len(chain) and (is_calm or node.gc_view.leading(chain) == len(chain))
            counts.append(remembered if whole else node.match(chain, deadline.left_s(), counts=False))
    return counts
