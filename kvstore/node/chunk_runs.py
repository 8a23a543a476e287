"""Several chunk files at a time, by native code that needs no GIL: found, read, mapped, staged.

Separate from ``chunks.py``, which does one chunk and decides everything: here is only what went well.  What did not is
said to be not done, and ``Chunks`` does it from scratch.  Called on lanes only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvstore import recency
from kvstore.address import Address, Chain
from kvstore.buffers import Borrowed
from kvstore.counts import NodeCount
from kvstore.format.header import Incarnation
from kvstore.hints import Hints
from kvstore.native import is_available
from kvstore.native import library as native
from kvstore.node.counters import Counters
from kvstore.node.encoded import Encodings
from kvstore.node.incarnations import Incarnations
from kvstore.node.known import Known
from kvstore.node.layer_run import LayerRun
from kvstore.node.runs import Run
from kvstore.node.shared_runs import Places, SharedPut, SharedRead, Sizes
from kvstore.node.unreadable import Unreadable
from kvstore.node.usage import NodeUsage
from kvstore.node.wanted import Wanted
from kvstore.recency import stamps_ns
from kvstore.root.interface import Root, local_files
from kvstore.sections import Laid, Sections


class SharedReads:
    """The chunks of one read, for lanes that read them together; ``note`` notes those that are DONE."""

    def __init__(self, run: SharedRead, counters: Counters, note: Callable[[], int]) -> None:
        self._run = run
        self._counters = counters
        self._note = note

    def read(self, borrowed: Borrowed) -> tuple[list[int], bool]:
        """One lane's turn: the chunks that are left to ``Chunks.read``, counted from 0, and whether there may be more
        to read. Raises Withdrawn.
        """
        with self._counters.timed("root", "read") as timed:
            left, more, timed.size_bytes = self._run.read(borrowed)
        return left, more

    def stop(self) -> None:
        """No chunk is begun any more."""
        self._run.stop()

    def end(self) -> npt.NDArray[np.bool_]:
        """Which were read and are right, when nobody writes into the memory any more. To be called once."""
        self._note()
        return self._run.done()


@dataclass(frozen=True, slots=True)
class ChunkWriter:
    """The parts that give a node's files their names, incarnations and encodings."""

    session: Callable[[], bytes]
    """The session to stage under; another one once the node has joined anew."""
    numbers: Iterator[int]
    """Numbers for the names of staged files; none comes twice."""
    incarnations: Incarnations
    encodings: Encodings
    usage: NodeUsage
    """Counts the bytes that the node writes, for collectors."""


class ChunkRuns:
    """Runs of the chunk files of one root; there are none where native code or the root cannot."""

    def __init__(
        self,
        root: Root,
        shard_bits: int,
        writer: ChunkWriter,
        known: Known,
        counters: Counters,
        quantum: Callable[[], int],
        unreadable: Unreadable,
    ) -> None:
        self._writer = writer
        self._unreadable = unreadable
        self._files = local_files(root) if is_available() else None
        self._shard_bits = shard_bits
        self._known = known
        self._counters = counters
        self._quantum = quantum

    def of(
        self, wanted: Wanted, first: int, count: int, sections: Sections | None = None, *, fills: bool = False
    ) -> Run | None:
        """Chunks ``first`` to ``first + count - 1`` for native code; None where they have to be done one by one.

        They are written from ``sections``, or read into it if it ``fills``; without it they are looked at, or mapped.
        """
        if self._files is None or count < 1 or self._writer.encodings.encrypts(wanted.namespace.tenant):
            return None
        if sections is None:
            return Run(self._files, self._shard_bits, wanted, first, count)
        if not isinstance(sections, Laid) or not sections.covers(first, count) or (fills and not sections.is_writable):
            return None
        return Run(self._files, self._shard_bits, wanted, first, count, sections)

    @property
    def is_native(self) -> bool:
        """Whether native code reads this root's files."""
        return self._files is not None

    @property
    def stages(self) -> bool:
        """Whether runs may be staged too."""
        return self._files is not None and self._files.stages

    def look(self, run: Run, start: int, stop: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Which chunks of part of a run are there, and the mtimes of those. The rest is ``Chunks.look``'s."""
        epoch = self._known.epoch
        found, mtimes_ns = run.look(start, stop)
        if self._doubt(run, np.arange(start - run.first, stop - run.first, dtype=np.int32)):
            part = run.items[start - run.first : stop - run.first]
            found = part["status"] == native.FOUND
            mtimes_ns = part["mtime_ns"][found]
        at, count = run.part(start, stop)
        self._known.add_run(at, np.arange(count, dtype=np.int32), native.FOUND, self._quantum(), epoch=epoch)
        return found, mtimes_ns

    def read(self, run: Run, start: int, stop: int, borrowed: Borrowed) -> npt.NDArray[np.bool_]:
        """Reads and verifies part of a run; True for what is right in its sections. The rest is ``Chunks.read``'s."""
        epoch = self._known.epoch
        with self._counters.timed("root", "read") as timed:
            done = run.read(start, stop, borrowed)
            timed.size_bytes = self._note(run, start, stop, epoch)
        return done

    def shared_read(self, run: Run, sizes: Sizes) -> SharedReads:
        """A run for lanes that read it together."""
        return SharedReads(
            SharedRead(run, sizes),
            self._counters,
            partial(self._note, run, run.first, run.first + run.count, self._known.epoch),
        )

    def of_layers(
        self,
        chain: Chain,
        count: int,
        images: npt.NDArray[np.uint64],
        parts: Sequence[tuple[int, int]],
        part_files_max: int,
    ) -> LayerRun | None:
        """The first chunks of a chain to be read layer by layer; None where that has to be done one by one."""
        files = None if self._files is None or self._files.direct else self._files
        if (
            not is_available()
            or self._writer.encodings.encrypts(chain.namespace.tenant)
            or (files is None and not images.any())
        ):
            return None
        return LayerRun(chain, count, images, files, self._shard_bits, parts, part_files_max)

    def read_layer(
        self, run: LayerRun, part: int, layer: int, addresses: Sequence[Address], borrowed: Borrowed
    ) -> npt.NDArray[np.bool_]:
        """Reads a layer of one part of a run; True for the chunks whose sections are right in their place."""
        epoch, from_files = self._known.epoch, run.from_files(part)
        with self._counters.timed("root" if from_files.any() else "memory", "read") as timed:
            done, opened = run.read(part, layer, borrowed)
            timed.size_bytes = int(np.count_nonzero(done)) * run.layer_bytes
        self._counters.add(NodeCount.BYTES_READ, int(np.count_nonzero(done & from_files)) * run.layer_bytes)
        where = run.parts[part][0] + np.flatnonzero(opened)
        if where.size:
            quantum = self._quantum()
            renewed = run.items["mtime_ns"][where] >= quantum * recency.NS_PER_S
            self._known.add_all([addresses[at] for at in where.tolist()], quantum, renewed=renewed, epoch=epoch)
        return done

    def _note(self, run: Run, start: int, stop: int, epoch: int) -> int:
        """Notes the chunks of part of a run that are DONE, as they were read; the bytes that they have."""
        at, count = run.part(start, stop)
        places = np.arange(count, dtype=np.int32)
        chunks, size_bytes = self._known.add_run(at, places, native.DONE, self._quantum(), epoch=epoch)
        if chunks:
            self._counters.add_read(size_bytes, chunks)
        return size_bytes

    def shared_put(self, run: Run, sizes: Sizes, *, depths: bool, durable: bool, hints: Hints) -> SharedPut:
        """A run for lanes that put it together."""
        put = SharedPut(run, sizes, self._writer.session(), durable, self._known.epoch)
        indexes = np.arange(run.first, run.first + run.count)
        run.items["number"] = list(islice(self._writer.numbers, run.count))
        run.items["incarnation"] = np.frombuffer(b"".join(self._incarnations_of(run, indexes)), "V16")
        run.items["mtime_ns"] = stamps_ns(self._quantum(), indexes if depths else np.zeros_like(indexes), hints)
        return put

    def stage(self, put: SharedPut) -> tuple[Places, bool]:
        """One lane's turn at a put: looks for chunks and stages what is missing; what is neither there nor staged then
        is ``Chunks``'s. The places of those that it took, and whether there may be more.
        """
        self._writer.incarnations.record()
        with self._counters.timed("root", "write") as timed:
            places, more, timed.size_bytes = put.stage()
        self._doubt(put.run, places)
        at = put.run.part(put.run.first, put.run.first)[0]
        self._known.add_run(at, places, native.FOUND, self._quantum(), epoch=put.epoch)
        self._known.forget_run(at, places, native.DONE)
        return places, more

    def publish(self, put: SharedPut, places: Places, *, ordered: bool) -> tuple[int, int]:
        """Publishes staged chunks: how many, and the bytes of their sections.

        What is ``ordered`` only up to the first that is for ``Chunks.publish``, as are others that are not PUBLISHED.
        """
        epoch, quantum = self._known.epoch, self._quantum()
        put.publish(places, ordered=ordered)
        at = put.run.part(put.run.first, put.run.first)[0]
        chunks, size_bytes = self._known.add_run(at, places, native.PUBLISHED, quantum, epoch=epoch)
        if chunks:
            published = places[put.run.items["status"][places] == native.PUBLISHED]
            self._writer.usage.wrote(size_bytes + int(put.run.items["header_bytes"][published].sum()))
            self._counters.add(NodeCount.CHUNKS_WRITTEN, chunks)
            self._counters.add(NodeCount.BYTES_WRITTEN, size_bytes)
        return chunks, size_bytes

    def _doubt(self, run: Run, places: Places) -> bool:
        """Leaves to ``Chunks`` what was found by its size alone and could not be read before; whether there was any."""
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
        """Of what comes from images: what was written there, by whomever, is only published now."""
        if not run.origins:
            return self._writer.incarnations.fresh_each(len(indexes))
        return [self._writer.incarnations.renewed(run.origins[index]) for index in indexes.tolist()]

    def map(self, run: Run, start: int, stop: int) -> tuple[npt.NDArray[np.bool_], list[memoryview | None]]:
        """Verified payloads of part of a run, mapped read-only. The rest is ``Chunks.map``'s."""
        epoch = self._known.epoch
        with self._counters.timed("root", "read") as timed:
            mapped = run.map(start, stop)
            timed.size_bytes = self._note(run, start, stop, epoch)
        return np.array([payload is not None for payload in mapped], np.bool_), mapped
