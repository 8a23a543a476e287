"""A node: what a worker serves, and what an engine has in its own process when it opens the root itself.

It joins the parts of this package and gives every call its deadline.  No call here touches etcd.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.address import Chain
from kvstore.buffers import Borrowed, Pieces
from kvstore.errors import KVStoreError, Overloaded, Unavailable
from kvstore.format import places
from kvstore.format.header import expected_chunk
from kvstore.hints import DEFAULT, Hints
from kvstore.meta.keys import Keys
from kvstore.namespace import Namespace, NamespaceDigest
from kvstore.node.blocks import Blocks
from kvstore.node.chains import RecentChains
from kvstore.node.chunks import Chunks
from kvstore.node.counters import Counters
from kvstore.node.deadline import Deadline
from kvstore.node.handing import copying, open_files
from kvstore.node.holds import Hold, Holds
from kvstore.node.known import Known
from kvstore.node.lanes import Batch, DeadlinePassed, Lanes
from kvstore.node.layers import LayerReader
from kvstore.node.limits import Limits
from kvstore.node.namespaces import NamespaceRecords
from kvstore.node.publish import GROUP_BYTES_MAX, GROUP_FILES_MAX, GROUP_SYNCED_MAX, Publication, Source
from kvstore.node.reading import Groups, Reading, group_size, leading_groups, matched_count, read_chunks, read_leading
from kvstore.node.refresh import Refresher
from kvstore.node.runs import Run
from kvstore.node.view import View
from kvstore.results import Cleared, LayerMemory, PutResult
from kvstore.root.identity import RootIdentity
from kvstore.root.interface import Root
from kvstore.root.posix import PosixReader, PosixRoot
from kvstore.sources import Clock, Ids, RandomIds, SystemClock

T = TypeVar("T")


class Node:
    """The chunks of one root, looked for, read, written and held. Thread-safe.

    Every method returns or raises within its deadline (``deadline_s`` where given, else the limit's).
    """

    def __init__(
        self,
        root: Root,
        identity: RootIdentity,
        *,
        session: Callable[[], bytes] | None = None,
        durable: bool = False,
        limits: Limits | None = None,
        clock: Clock | None = None,
        ids: Ids | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        self.root = root
        self.identity = identity
        self.limits = limits = limits or Limits()
        self.clock = clock = clock or SystemClock()
        self.ids = ids = ids or RandomIds()
        self.id = ids.fresh()
        self.durable = durable
        self.counters = Counters()
        self._lanes = lanes or Lanes(limits.lanes, limits.width, limits.queue_max, limits.stall_s, clock)
        self.known = Known(limits.known_max, limits.quantum_s)
        self.chains = RecentChains(limits.chains_bytes_max)
        self.gc_view = View(Keys(identity.root), identity.shard_bits, self.known, self.counters)
        numbers = itertools.count()
        session = session or (lambda: self.id)
        self._session = session
        self._chunks = Chunks(
            root, identity.shard_bits, session, self.known, self.counters, limits.quantum_s, clock, ids, numbers
        )
        self._records = NamespaceRecords(root, session, numbers, clock)
        self._refresher = Refresher(self._chunks, self.counters, limits.refresh_queue_max)
        self.holds = Holds(self.gc_view, limits.holds_max, limits.hold_max_s, self.counters, clock, ids)
        self.blocks = Blocks(self._chunks, self.gc_view, self._lanes, self._refresher, self.counters)
        self._closed = False

    # Namespaces

    def claim_namespace(self, namespace: Namespace, deadline_s: float | None = None) -> None:
        """Claims the namespace's name on the root for its layout. Raises LayoutMismatch, or what the root raised."""
        self._lanes.run(
            lambda: self._records.claim(namespace), self._deadline(deadline_s, self.limits.write_deadline_s)
        )

    def check_namespace(self, namespace: Namespace, deadline_s: float | None = None) -> None:
        """Raises LayoutMismatch where the root has the name with another layout; claims nothing."""
        self._lanes.run(lambda: self._records.check(namespace), self._deadline(deadline_s, self.limits.read_deadline_s))

    def find_namespace(self, digest: NamespaceDigest, deadline_s: float | None = None) -> Namespace | None:
        """The namespace with this digest, if it was ever used on this root."""
        return self._lanes.run(
            lambda: self._records.find(digest), self._deadline(deadline_s, self.limits.read_deadline_s)
        )

    def namespaces(self, deadline_s: float | None = None) -> list[Namespace]:
        """All namespaces recorded on the root."""
        return self._lanes.run(self._records.list, self._deadline(deadline_s, self.limits.read_deadline_s))

    # Prefixes

    def match(self, chain: Chain, deadline_s: float | None = None) -> int:
        """How many leading chunks are in the store. A miss, never an error, when the root does not answer."""
        deadline = self._deadline(deadline_s, self.limits.match_deadline_s)
        allowed = chain.leading(self.gc_view.leading(chain.addresses))
        count = matched_count(self._chunks, self._lanes, self.counters, allowed, deadline)
        size = chain.namespace.layout.chunk_tokens
        self.counters.add("requests_match")
        self.counters.add("tokens_asked", len(chain) * size)
        self.counters.add("tokens_matched", count * size)
        return count

    def hold(self, chain: Chain, ttl_s: float | None = None, deadline_s: float | None = None) -> Hold:
        """Holds the leading chunks that are in the store. Raises Overloaded where too many holds are alive."""
        hold = self.holds.take(chain, ttl_s)
        try:
            hold.count = self.match(hold.chain, deadline_s)
            hold.chain = chain.leading(hold.count)
        except BaseException:
            self.holds.release(hold)
            raise
        return hold

    def release(self, hold: Hold) -> None:
        """Ends a hold; idempotent."""
        self.holds.release(hold)

    def read(self, hold: Hold, into: Callable[[int], Pieces], deadline_s: float | None = None) -> int:
        """Reads held chunks into ``into(index)``, their sections in order; returns how many leading ones are good.

        What lies behind them in the caller's memory is undefined, and not touched after this returns.
        Raises HoldBroken where the hold has ended.
        """
        self.holds.check(hold)
        deadline = self._deadline(deadline_s, self.limits.read_deadline_s)
        self.counters.add("requests_get")
        count = read_leading(self._chunks, self._lanes, self.counters, hold.chain, hold.count, into, deadline)
        self._used(hold.chain, count)
        return count

    def begin_read(self, hold: Hold, first: int, count: int, into: Callable[[int], Pieces]) -> Reading:
        """Begins to read ``count`` held chunks from index ``first`` on into ``into(index)``, as for a stream that sends
        some while the next are read.  Wait for it, or withdraw it; tell ``used`` at the end.

        Raises HoldBroken where the hold has ended.
        """
        self.holds.check(hold)

        def read(at: int, borrowed: Borrowed) -> bool:
            return self._chunks.read(expected_chunk(hold.chain, first + at), into(first + at), borrowed)

        groups = leading_groups(self._chunks, self._lanes, hold.chain, first, count, into)
        return Reading(self._lanes, self.counters, count, read, groups=groups)

    @property
    def hands_files(self) -> bool:
        """Whether chunks are files that can be handed to another process of this host."""
        return isinstance(self.root, PosixRoot)

    def open_files(self, hold: Hold, first: int, count: int, deadline_s: float | None = None) -> list[PosixReader]:
        """The open files of ``count`` held chunks from index ``first`` on, the caller's to close, up to the first that
        is missing.  Only their headers are verified; tell ``used`` at the end.

        Raises HoldBroken where the hold has ended.
        """
        self.holds.check(hold)
        deadline = self._deadline(deadline_s, self.limits.read_deadline_s)
        indexes = range(first, first + count)
        return open_files(self._chunks, self._lanes, self.counters, hold.chain, indexes, deadline)

    def begin_copy(self, hold: Hold, first: int, count: int, into: Callable[[int], memoryview]) -> Reading:
        """As ``begin_read``, but of whole files, header and all, of which only the header is verified."""
        self.holds.check(hold)
        indexes = range(first, first + count)
        return copying(self._chunks, self._lanes, self.counters, hold.chain, indexes, into)

    def used(self, hold: Hold, count: int) -> None:
        """Notes a read of the ``count`` leading chunks of a hold, whose recency is renewed."""
        self.counters.add("requests_get")
        self._used(hold.chain, count)

    def read_layers(
        self, hold: Hold, memory: Callable[[int], LayerMemory], deadline_s: float | None = None
    ) -> Iterator[tuple[int, LayerMemory]]:
        """Yields each layer once all held tokens of it are in ``memory(layer)``, the next one being read meanwhile.

        ``deadline_s`` is for each layer. Raises HoldBroken where a chunk was lost or the hold has ended.
        """
        self.holds.check(hold)
        self.counters.add("requests_get")
        if not hold.count:
            return
        reader = LayerReader(
            self._chunks, self._lanes, self.counters, hold.chain, hold.count, self.limits.open_files_max
        )
        for layer, filled in reader.read(memory, lambda: self._deadline(deadline_s, self.limits.read_deadline_s)):
            self.holds.check(hold)
            yield layer, filled
        self._used(hold.chain, hold.count)

    def view(self, hold: Hold, deadline_s: float | None = None) -> list[npt.NDArray[Any]]:
        """The held chunks as read-only arrays of shape ``(layers, 2, chunk_tokens, kv_heads, head_dim)``.

        Mapped from the root where it can be mapped (the first ``open_files_max``), without a copy; verified. Fewer than
        held where one was lost.
        A mapping stays readable after the hold ends, as long as nobody truncates the file.
        """
        self.holds.check(hold)
        self.counters.add("requests_get")
        chain, layout = hold.chain, hold.chain.namespace.layout
        payloads: list[memoryview | None] = [None] * hold.count
        mapped_max = min(hold.count, self.limits.open_files_max) if self.root.traits.mapped else 0
        run = self._chunks.runs.of(chain, 0, mapped_max)

        def read(index: int, borrowed: Borrowed) -> bool:
            expected = expected_chunk(chain, index)
            # Each mapping keeps a file descriptor; beyond the limit they are copies, or the engine would run out.
            if index < mapped_max:
                payloads[index] = self._chunks.map(expected)
                return payloads[index] is not None
            memory = memoryview(bytearray(layout.chunk_bytes))
            size = layout.section_bytes
            sections = [memory[start : start + size] for start in range(0, len(memory), size)]
            payloads[index] = memory.toreadonly()
            return self._chunks.read(expected, sections, borrowed)

        deadline = self._deadline(deadline_s, self.limits.read_deadline_s)
        groups = None
        if run is not None:

            def map_group(start: int, stop: int, _: Borrowed) -> npt.NDArray[np.bool_]:
                done = np.zeros(stop - start, np.bool_)
                end = min(stop, mapped_max)
                if start < end:
                    done[: end - start], payloads[start:end] = self._chunks.runs.map(run, start, end, chain.addresses)
                return done

            groups = Groups(group_size(hold.count, layout.chunk_bytes, self._lanes.width), hold.count, map_group)
        done = read_chunks(self._lanes, self.counters, hold.count, read, deadline, groups=groups)
        first_miss = done.find(0)
        count = hold.count if first_miss < 0 else first_miss
        self._used(chain, count)
        return [
            np.frombuffer(payload, dtype=layout.numpy_dtype).reshape(layout.shape(layout.chunk_tokens))
            for payload in payloads[:count]
            if payload is not None
        ]

    # Publishing

    def put(
        self,
        chain: Chain,
        first: int,
        source: Source,
        deadline_s: float | None = None,
        hints: Hints = DEFAULT,
    ) -> PutResult:
        """Stores the chunks from ``first`` on whose parents are there; ``source(index)`` gives their sections.

        Where a chunk before ``first`` is missing nothing is stored, and the result says up to where the store goes.
        Raises Overloaded (no space), PermissionDenied or Unavailable; what was published until then stays.
        """
        deadline = self._deadline(deadline_s, self.limits.write_deadline_s)
        putting = self.begin_put(chain, first, deadline.left_s(), hints)
        try:
            if not putting.refused:
                putting.store_all(source, deadline)
        except DeadlinePassed:
            putting.abandon(wait_s=0.0)
            raise
        except BaseException:
            putting.abandon()
            raise
        return putting.finish(deadline.left_s())

    def begin_put(self, chain: Chain, first: int, deadline_s: float | None = None, hints: Hints = DEFAULT) -> Putting:
        """A put whose chunks arrive one by one, as over a network. End it with ``finish`` or ``abandon``."""
        self.counters.add("requests_put")
        self.gc_view.check_room()
        deadline = self._deadline(deadline_s, self.limits.write_deadline_s)
        # What a sweep is taking cannot be put again before it has ended: the rest of the prompt waits for that.
        chain = chain.leading(self.gc_view.leading(chain.addresses))
        publication = Publication(self._chunks, self._refresher, chain, first, self.durable, hints)
        present = self._leading(min(first, len(chain)), publication.look, deadline)
        return Putting(self, chain, first, present, publication, self._lanes)

    def present_leading(self, chain: Chain, count: int, deadline_s: float | None = None) -> int:
        """How many of the first ``count`` chunks are there, each looked at: a put or pin must not build on a hole."""
        deadline = self._deadline(deadline_s, self.limits.match_deadline_s)
        return self._leading(count, lambda index: self._chunks.is_present(expected_chunk(chain, index)), deadline)

    def run_for_put(self, chain: Chain, first: int, count: int, source: Source) -> Run | None:
        """The chunks of a put as a run; None where they are stored one by one."""
        return self._chunks.runs.of(chain, first, count, source) if self._chunks.runs.stages else None

    # Looking after it

    def on_root(self, work: Callable[[], T]) -> T:
        """Does something with the root on a lane, within the deadline of a write. Raises what it raises."""
        return self._lanes.run(work, self._deadline(None, self.limits.write_deadline_s))

    def forget(self) -> None:
        """Forgets what was known to be present; holds stay."""
        self.known.clear()

    def remove(self, namespace: Namespace, keep: Callable[[bytes], bool], deadline_s: float) -> Cleared:
        """Deletes the chunks of a namespace but those that ``keep`` names.

        Whoever reads one of them at that moment has a miss.
        """
        deadline = self._deadline(deadline_s, deadline_s)
        folders = self._lanes.run(
            lambda: [entry.name for entry in self.root.list(places.CHUNKS) if entry.stat is None], deadline
        )
        removed: list[int] = []

        def sweep(index: int) -> bool:
            folder = places.Name(f"{places.CHUNKS}/{folders[index]}")
            for entry in self.root.list(folder):
                parsed = places.parse_chunk(entry.name)
                if not parsed or not entry.stat or parsed[1] != namespace.id or keep(parsed[0]):
                    continue
                self.known.forget(parsed[0])
                if self.root.remove(places.Name(f"{folder}/{entry.name}")):
                    removed.append(entry.stat.size_bytes)
                if deadline.passed:
                    return False
            return True

        self._lanes.each(len(folders), sweep, deadline)
        if deadline.passed:
            raise Unavailable(f"deleted {len(removed)} chunks until the deadline: call again for the rest")
        return Cleared(len(removed), sum(removed))

    def stats(self) -> dict[str, int | float]:
        """All counters, and how full the bounded things are."""
        return {
            **self.counters.snapshot(),
            "known_chunks": len(self.known),
            "holds": len(self.holds),
            "lane_queue": self._lanes.waiting_count,
            "root_hangs": int(self._lanes.stalled),
            "native_path": int(self._chunks.runs.is_native),
        }

    def drain(self) -> None:
        """Returns when recency of everything used so far is renewed; for orderly shutdown and tests."""
        self._refresher.drain()

    def close(self, timeout_s: float = 2.0) -> None:
        """Ends holds and threads and removes the staging folder, if the root answers in time. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.holds.drop_all()
        self._refresher.close(timeout_s)
        try:
            folder = places.staging_folder(self._session())
            self._lanes.run(lambda: self.root.remove_folder(folder), Deadline(self.clock, timeout_s))
        except KVStoreError:
            pass  # a hung or read-only root: fsck finds an empty folder later
        self._lanes.close(timeout_s)
        self.root.close()

    def _used(self, chain: Chain, count: int) -> None:
        self._refresher.used(chain.namespace.id, chain.addresses[:count], chained=True)

    def _leading(self, count: int, is_present: Callable[[int], bool], deadline: Deadline) -> int:
        missing = [count]

        def look(index: int) -> bool:
            if is_present(index):
                return True
            missing.append(index)
            return False

        self._lanes.each(count, look, deadline)
        return min(missing)

    def _deadline(self, asked_s: float | None, default_s: float) -> Deadline:
        return Deadline(self.clock, default_s if asked_s is None else asked_s)


DISCARD_S = 1.0
"""How long a put that failed waits for its staged files to be removed, so that a full disk is not full of them."""


class Putting:
    """A put in progress: ``add`` chunks in any order, then ``finish``."""

    def __init__(
        self, node: Node, chain: Chain, first: int, present: int, publication: Publication, lanes: Lanes
    ) -> None:
        self._node = node
        self._chain = chain
        self._first = first
        self._present = present
        self._publication = publication
        self._lanes = lanes
        self._pending: list[Batch] = []
        self.refused = present < first
        """Whether a chunk before the first is missing, so that nothing will be stored."""

    def store(self, index: int, sections: Pieces) -> bool:
        """Stores one chunk, in the calling thread, unless it is there, or being swept."""
        if index >= len(self._chain):
            return True
        if not self._publication.find(index):
            self._publication.add(index, sections)
        return True

    def store_all(self, source: Source, deadline: Deadline) -> None:
        """Stores all chunks from the first on, several lanes at once, and waits for it. Raises what the root raised."""
        self._begin(source, self._first, len(self._chain) - self._first).wait(deadline)

    def add_run(self, source: Source, first: int, count: int, deadline_s: float) -> None:
        """As ``add``, for ``count`` chunks from index ``first`` on: at most two such runs are in flight."""
        count = min(count, len(self._chain) - first)
        if self.refused or count <= 0:
            return
        if len(self._pending) >= 2:
            self._pending.pop(0).wait(Deadline(self._node.clock, deadline_s))
        self._pending.append(self._begin(source, first, count))

    def _begin(self, source: Source, first: int, count: int) -> Batch:
        run = self._node.run_for_put(self._chain, first, count, source)
        if run is None:
            return self._lanes.start(count, lambda at: self.store(first + at, source(first + at)))
        files_max = GROUP_SYNCED_MAX if self._node.durable else GROUP_FILES_MAX
        chunk_bytes = self._chain.namespace.layout.chunk_bytes
        size = group_size(count, chunk_bytes, self._lanes.width, GROUP_BYTES_MAX, files_max)

        def store(number: int) -> bool:
            start = first + number * size
            full: Overloaded | None = None
            for index in self._publication.add_run(run, start, min(start + size, first + count)):
                try:
                    self.store(index, source(index))
                except Overloaded as error:
                    if not self._publication.make_room(index):
                        raise
                    full = error
                    self.store(index, source(index))
            if full is not None:
                raise full  # what made room is not stored
            return True

        return self._lanes.start(-(-count // size), store)

    def add(self, index: int, sections: Pieces, deadline_s: float) -> None:
        """Begins to store one chunk; its memory must stay as it is until ``finish``.

        At most two are in flight: returns when there is room. Raises what the root raised.
        """
        if self.refused:
            return
        if len(self._pending) >= 2:
            self._pending.pop(0).wait(Deadline(self._node.clock, deadline_s))
        self._pending.append(self._lanes.start(1, lambda _: self.store(index, sections)))

    def finish(self, deadline_s: float) -> PutResult:
        """Waits for what is in flight, and says what was done. Raises what the root raised, or Unavailable."""
        size = self._chain.namespace.layout.chunk_tokens
        if self.refused:
            return PutResult(self._present * size, 0, 0, 0)
        deadline = Deadline(self._node.clock, deadline_s)
        try:
            for batch in self._pending:
                batch.wait(deadline)
        except DeadlinePassed:
            self.abandon(wait_s=0.0)
            raise
        except BaseException:
            self.abandon()
            raise
        result = self._publication.result()
        swept = self._node.gc_view.leading(self._chain.addresses) * size
        if swept < result.tokens_present:
            result = replace(result, tokens_present=swept)  # condemned while it was being put
        self._node.counters.add("chunks_found", result.chunks_found)
        self._publication.used(result.tokens_present // size)
        return result

    def abandon(self, wait_s: float = DISCARD_S) -> None:
        """Publishes nothing more, and removes what is staged; waits for that at most ``wait_s``. Idempotent."""
        self._node.counters.add("put_failed")
        staged = self._publication.abandon()
        try:
            batch = self._lanes.start(len(staged), lambda index: self._publication.discard(staged[index]))
            if wait_s:
                batch.wait(Deadline(self._node.clock, wait_s))
        except KVStoreError:
            pass  # the root does not answer: fsck finds what is left
