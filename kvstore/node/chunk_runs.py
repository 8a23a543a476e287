"""Runs of chunk files for native code, which needs no GIL: look, read, map, stage.

Separate from ``chunks.py``, which handles one chunk and makes every decision. Native code does the common good case.
Failures are reported; ``Chunks`` redoes those one by one. Called on lanes only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvstore import recency
from kvstore.address import Address, Chain
from kvstore.buffers import Borrowed, Withdrawn
from kvstore.counts import NodeCount
from kvstore.format.header import Incarnation
from kvstore.hints import Hints
from kvstore.native import is_available
from kvstore.native import library as native
from kvstore.node.counters import Counters
from kvstore.node.encoded import Encodings
from kvstore.node.gc_state import Usage
from kvstore.node.incarnations import Incarnations
from kvstore.node.known import Known
from kvstore.node.layer_run import LayerRun
from kvstore.node.runs import Places, Run, SharedPut, SharedRun, Sizes
from kvstore.node.unreadable import Unreadable
from kvstore.node.wanted import Wanted
from kvstore.recency import stamps_ns
from kvstore.root.interface import Root, local_files
from kvstore.sections import Laid, Sections


class SharedRead(SharedRun):
    """The chunks of one read on their way into the caller's memory."""

    def __init__(self, runs: ChunkRuns, run: Run, sizes: Sizes, counters: Counters, epoch: int) -> None:
        super().__init__(run, sizes)
        self._runs = runs
        self._counters = counters
        self._epoch = epoch

    def read(self, borrowed: Borrowed) -> tuple[list[int], bool]:
        """Takes one lane's turn. Raises Withdrawn.

        Returns the offsets of the chunks that are left to ``Chunks.read``, and whether there may be more to read.
        """
        run, (turn, told) = self.run, self.turn()
        with self._counters.timed("root", "read") as timed:
            outcome = native.library.kv_read_turn(run.common, run.at(0), run.count, turn, borrowed.natively)
            timed.size_bytes, left = turn.bytes, told[: turn.told_count]
            if left.size:
                run.read_blocked(left, borrowed)
                is_read = run.items["status"][left] == native.DONE
                timed.size_bytes += sum(map(run.payload_bytes, left[is_read].tolist()))
                left = left[~is_read]
        if outcome < 0:
            raise Withdrawn
        return left.tolist(), bool(outcome)

    def end(self) -> npt.NDArray[np.bool_]:
        """Returns which chunks were read and verified. Call it once, when nobody writes into the memory any more."""
        run = self.run
        self._runs.note(run, run.first, run.first + run.count, self._epoch)
        done: npt.NDArray[np.bool_] = run.items["status"] == native.DONE
        return done


@dataclass(frozen=True, slots=True)
class ChunkWriter:
    """The parts that give a node's files their names, incarnations and encodings."""

    session: Callable[[], bytes]
    """The session to stage under; another one once the node has joined anew."""
    numbers: Iterator[int]
    """Numbers for the names of staged files; none comes twice."""
    incarnations: Incarnations
    encodings: Encodings
    usage: Usage
    """Counts the bytes that the node writes, for collectors."""


class ChunkRuns:
    """Makes runs of the chunk files of one root; makes none if native code or the root cannot."""

    def __init__(
        self,
        root: Root,
        shard_bits: int,
        writer: ChunkWriter,
        known: Known,
        counters: Counters,
        unreadable: Unreadable,
    ) -> None:
        self._writer = writer
        self._unreadable = unreadable
        self._files = local_files(root) if is_available() else None
        self._shard_bits = shard_bits
        self._known = known
        self._counters = counters

    def of(
        self, wanted: Wanted, first: int, count: int, sections: Sections | None = None, *, fills: bool = False
    ) -> Run | None:
        """Returns chunks ``first`` to ``first + count - 1`` as a native run; None if they must be done one by one.

        The run is written from ``sections``, or read into them if it ``fills``. Without sections it is looked at or
        mapped.
        """
        if self._files is None or count < 1 or self._writer.encodings.encodes(wanted.namespace.tenant):
            return None
        if sections is None:
            return Run(self._files, self._shard_bits, wanted, first, count)
        if not isinstance(sections, Laid) or not sections.covers(first, count) or (fills and not sections.is_writable):
            return None
        return Run(self._files, self._shard_bits, wanted, first, count, sections)

    @property
    def is_native(self) -> bool:
        """True if native code reads this root's files."""
        return self._files is not None

    @property
    def stages(self) -> bool:
        """True if native code also stages runs."""
        return self._files is not None and self._files.stages

    def look(self, run: Run, start: int, stop: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Returns which chunks of part of a run exist, and their mtimes. ``Chunks.look`` decides about the rest."""
        return self._look(run, start, stop, self._known.epoch)

    def _look(self, run: Run, start: int, stop: int, epoch: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        found, mtimes_ns = run.look(start, stop)
        if self._doubt(run, np.arange(start - run.first, stop - run.first, dtype=np.int32)):
            part = run.items[start - run.first : stop - run.first]
            found = part["status"] == native.FOUND
            mtimes_ns = part["mtime_ns"][found]
        at, count = run.part(start, stop)
        self._known.add_run(at, count, native.FOUND, self._known.quantum(), epoch=epoch)
        return found, mtimes_ns

    def present(self, run: Run, start: int, stop: int, epoch: int) -> tuple[npt.NDArray[np.bool_], list[int]]:
        """Returns which blocks of part of a run exist, whatever their size, and the indexes of those not known yet.

        ``epoch`` is the epoch of what the node remembers, read before anybody made sure that none is condemned.
        """
        assert self._files is not None
        found, _ = self._look(run, start, stop, epoch)
        statuses = run.items["status"][start - run.first : stop - run.first]
        is_known = statuses == native.FOUND
        if self._files.knows_absence:
            is_known |= statuses == native.ABSENT
        left: list[int] = (start + np.flatnonzero(~is_known)).tolist()
        return found, left

    def read(self, run: Run, start: int, stop: int, borrowed: Borrowed) -> npt.NDArray[np.bool_]:
        """Reads and verifies part of a run; True for each chunk that is right. ``Chunks.read`` does the rest."""
        epoch = self._known.epoch
        with self._counters.timed("root", "read") as timed:
            done = run.read(start, stop, borrowed)
            timed.size_bytes = self.note(run, start, stop, epoch)
        return done

    def shared_read(self, run: Run, sizes: Sizes) -> SharedRead:
        """Returns a run that several lanes read together."""
        return SharedRead(self, run, sizes, self._counters, self._known.epoch)

    def of_layers(
        self,
        chain: Chain,
        images: npt.NDArray[np.uint64],
        size: int,
        files_max: int,
        at_once: int,
    ) -> LayerRun | None:
        """Returns the first chunks of a chain, one for each image, for a layer-by-layer read in groups of ``size``.

        None if they must be read one by one.
        """
        files = None if self._files is None or self._files.direct else self._files
        if (
            not is_available()
            or self._writer.encodings.encodes(chain.namespace.tenant)
            or (files is None and not images.any())
        ):
            return None
        return LayerRun(chain, images, files, self._shard_bits, size, files_max, at_once)

    def read_layers(
        self,
        run: LayerRun,
        band: int,
        layers: range,
        addresses: Sequence[Address],
        start: int,
        stop: int,
        borrowed: Borrowed,
    ) -> npt.NDArray[np.bool_]:
        """Reads a band of layers of one group of a run; True for each chunk whose sections are right in their place."""
        epoch, from_files = self._known.epoch, run.from_files[start:stop]
        with self._counters.timed("root" if from_files.any() else "memory", "read") as timed:
            done, opened, mtimes_ns = run.read(start, stop, band, layers.start, borrowed)
            size_bytes = len(layers) * run.layer_bytes
            timed.size_bytes = int(np.count_nonzero(done)) * size_bytes
        for right, chunks, payload in (
            (done & from_files, NodeCount.CHUNKS_READ, NodeCount.BYTES_READ),
            (done & ~from_files, NodeCount.MEMORY_HITS, NodeCount.MEMORY_BYTES),
        ):
            if count := int(np.count_nonzero(right)):
                self._counters.add(payload, count * size_bytes)
                if not layers.start:  # a chunk counts once, with its first layer
                    self._counters.add(chunks, count)
        where = start + np.flatnonzero(opened)
        if where.size:
            quantum = self._known.quantum()
            renewed = mtimes_ns >= quantum * recency.NS_PER_S
            self._known.add_all([addresses[at] for at in where.tolist()], quantum, renewed=renewed, epoch=epoch)
        return done

    def note(self, run: Run, start: int, stop: int, epoch: int) -> int:
        """Remembers the DONE chunks of part of a run as present; returns the bytes of their sections."""
        at, count = run.part(start, stop)
        chunks, size_bytes = self._known.add_run(at, count, native.DONE, self._known.quantum(), epoch=epoch)
        if chunks:
            self._counters.add_read(size_bytes, chunks)
        return size_bytes

    def shared_put(
        self,
        run: Run,
        sizes: Sizes,
        depths: npt.NDArray[np.int64],
        *,
        stamped_s: float,
        durable: bool,
        hints: Hints,
        abandoned: ctypes.c_int32 | None = None,
    ) -> SharedPut:
        """Returns a run that several lanes put together; ``depths`` are the indexes of its chunks in their prompt.

        ``stamped_s`` is the time of their stamps; ``abandoned`` is as in ``SharedPut``.
        """
        put = SharedPut(run, sizes, self._writer.session(), durable, self._known.epoch, abandoned)
        indexes = np.arange(run.first, run.first + run.count)
        run.items["number"] = list(islice(self._writer.numbers, run.count))
        run.items["incarnation"] = np.frombuffer(b"".join(self._incarnations_of(run, indexes)), "V16")
        run.items["mtime_ns"] = stamps_ns(stamped_s, depths, hints)
        return put

    def stage(self, put: SharedPut) -> tuple[Places, bool]:
        """Takes one lane's turn at a put: looks for chunks and stages those that are missing.

        Returns the offsets of the chunks that it took, and whether there may be more. ``Chunks`` does those that are
        then neither found nor staged; ``publish`` counts those that are PUBLISHED.
        """
        self._writer.incarnations.record()
        with self._counters.timed("root", "write") as timed:
            places, more, timed.size_bytes = put.stage()
        if not len(places):
            return places, more
        self._doubt(put.run, places)
        at = put.run.at(0)
        self._known.add_run(at, places, native.FOUND, self._known.quantum(), epoch=put.epoch)
        for status in (native.DONE, native.PUBLISHED):
            self._known.forget_run(at, places, status)
        return places, more

    def publish(self, put: SharedPut, places: Places, *, ordered: bool, epoch: int | None = None) -> tuple[int, int]:
        """Publishes staged chunks, and counts those that are PUBLISHED; returns how many, and the bytes of their
        sections.

        An ``ordered`` call stops at the first chunk that native code cannot publish. ``Chunks.publish`` does those that
        are not PUBLISHED. With ``epoch`` they are PUBLISHED already, and only counted: it is the epoch of what the node
        remembers from before.
        """
        if epoch is None:
            epoch = self._known.epoch
            put.publish(places, ordered=ordered)
        at = put.run.at(0)
        chunks, size_bytes = self._known.add_run(at, places, native.PUBLISHED, self._known.quantum(), epoch=epoch)
        if chunks:
            published = places[put.run.items["status"][places] == native.PUBLISHED]
            self._writer.usage.wrote(size_bytes + int(put.run.items["header_bytes"][published].sum()))
            self._counters.add(NodeCount.CHUNKS_WRITTEN, chunks)
            self._counters.add(NodeCount.BYTES_WRITTEN, size_bytes)
        return chunks, size_bytes

    def _doubt(self, run: Run, places: Places) -> bool:
        """Leaves to ``Chunks`` what was found by size alone and was unreadable before; True if there was any."""
        if not len(self._unreadable):
            return False
        suspects = [
            place
            for place in places.tolist()
            if run.items["status"][place] == native.FOUND and run.items["address"][place].tobytes() in self._unreadable
        ]
        run.items["status"][suspects] = native.OTHER
        return bool(suspects)

    def _incarnations_of(self, run: Run, indexes: npt.NDArray[np.intp]) -> list[Incarnation]:
        """Returns fresh incarnations; those of chunks from images keep writer and time of the image."""
        if not run.origins:
            return self._writer.incarnations.fresh_each(len(indexes))
        return [self._writer.incarnations.renewed(run.origins[index]) for index in indexes.tolist()]

    def map(self, run: Run, start: int, stop: int) -> tuple[npt.NDArray[np.bool_], list[memoryview | None]]:
        """Returns verified payloads of part of a run, mapped read-only. ``Chunks.map`` does the rest."""
        epoch = self._known.epoch
        with self._counters.timed("root", "read") as timed:
            mapped = run.map(start, stop)
            timed.size_bytes = self.note(run, start, stop, epoch)
        return np.array([payload is not None for payload in mapped], np.bool_), mapped
