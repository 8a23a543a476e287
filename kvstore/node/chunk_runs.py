"""Several chunk files at a time, by native code that needs no GIL: found, read, mapped, staged.

Separate from ``chunks.py``, which does one chunk and decides everything: here is only what went well.  What did not is
said to be not done, and ``Chunks`` does it from scratch.  Called on lanes only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstore import recency
from kvstore.address import Address, Chain
from kvstore.buffers import Borrowed
from kvstore.format import places
from kvstore.format.header import Incarnation
from kvstore.format.places import Name
from kvstore.hints import Hints
from kvstore.namespace import Namespace
from kvstore.native import is_available
from kvstore.native import library as native
from kvstore.node.counters import Counters
from kvstore.node.encoded import Encodings
from kvstore.node.images import Images
from kvstore.node.incarnations import Incarnations
from kvstore.node.known import Known
from kvstore.node.layer_run import LayerRun
from kvstore.node.runs import Run, block_run, chain_run
from kvstore.planes import Planes
from kvstore.recency import is_fresh, stamp_ns
from kvstore.root.interface import Root, Stat, local_files


class ChunkRuns:
    """Runs of the chunk files of one root; there are none where native code or the root cannot."""

    def __init__(
        self,
        root: Root,
        shard_bits: int,
        session: Callable[[], bytes],
        known: Known,
        counters: Counters,
        quantum: Callable[[], int],
        incarnations: Incarnations,
        numbers: Iterator[int],
        encodings: Encodings,
    ) -> None:
        self._encodings = encodings
        self._files = local_files(root) if is_available() else None
        self._shard_bits = shard_bits
        self._session = session
        self._known = known
        self._counters = counters
        self._quantum = quantum
        self._incarnations = incarnations
        self._numbers = numbers

    def of(self, chain: Chain, first: int, count: int, into: object = None, *, fills: bool = False) -> Run | None:
        """Chunks of a chain as a run for native code; None where it has to be done one by one.

        ``into`` has their sections, and is written to if it ``fills``; a run without one is only for mapping.
        """
        if self._files is None or count < 1 or self._encodings.encrypts(chain.namespace.tenant):
            return None
        if into is None:
            return chain_run(self._files, self._shard_bits, chain, first, count, None)
        if not isinstance(into, Planes | Images) or not into.covers(first, count):
            return None
        if fills and not (isinstance(into, Planes) and into.is_writable):
            return None
        return chain_run(self._files, self._shard_bits, chain, first, count, into)

    @property
    def is_native(self) -> bool:
        """Whether native code reads this root's files."""
        return self._files is not None

    @property
    def stages(self) -> bool:
        """Whether runs may be staged too."""
        return self._files is not None and self._files.stages

    def of_blocks(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        addresses: Sequence[Address],
        buffers: Sequence[memoryview],
        *,
        fills: bool = False,
    ) -> Run | None:
        """The same of engine-hashed blocks, each with its buffer."""
        if self._files is None or not keys or not all(map(len, buffers)):
            return None
        if self._encodings.encrypts(namespace.tenant):
            return None
        if fills and any(buffer.readonly for buffer in buffers):
            return None
        return block_run(self._files, self._shard_bits, namespace, keys, addresses, buffers)

    def read(
        self, run: Run, start: int, stop: int, addresses: Sequence[Address], borrowed: Borrowed
    ) -> npt.NDArray[np.bool_]:
        """Reads and verifies part of a run; True for what is right in its sections. The rest is ``Chunks.read``'s."""
        epoch = self._known.epoch
        with self._counters.timed("root", "read") as timed:
            done = run.read(start, stop, borrowed)
            timed.size_bytes = self._note(run, start, stop, done, addresses, epoch)
        return done

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
            or self._encodings.encrypts(chain.namespace.tenant)
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
        self._counters.add("bytes_read", int(np.count_nonzero(done & from_files)) * run.layer_bytes)
        where = run.parts[part][0] + np.flatnonzero(opened)
        if where.size:
            quantum = self._quantum()
            renewed = run.items["mtime_ns"][where] >= quantum * recency.NS_PER_S
            self._known.add_all([addresses[at] for at in where.tolist()], quantum, renewed=renewed, epoch=epoch)
        return done

    def _note(
        self, run: Run, start: int, stop: int, done: npt.NDArray[np.bool_], addresses: Sequence[Address], epoch: int
    ) -> int:
        """Notes the chunks of part of a run that were read; the bytes that they have."""
        where = np.flatnonzero(done)
        if not where.size:
            return 0
        quantum, items = self._quantum(), run.items[start - run.first : stop - run.first][where]
        renewed = items["mtime_ns"] >= quantum * recency.NS_PER_S
        read = [addresses[start + place] for place in where.tolist()]
        self._known.add_all(read, quantum, renewed=renewed, epoch=epoch)
        size_bytes = int((items["section_count"] * items["section_bytes"]).sum())
        self._counters.add_read(size_bytes, where.size)
        return size_bytes

    def stage(
        self, run: Run, start: int, stop: int, addresses: Sequence[Address], depths: bool, durable: bool, hints: Hints
    ) -> list[Name | Stat | None]:
        """Looks for part of a run and stages what is missing.

        For each the name of the staged file, or what is there already; None where ``Chunks`` has to do it.
        """
        epoch, quantum = self._known.epoch, self._quantum()
        items = run.items[start - run.first : stop - run.first]
        statuses = run.look(start, stop)
        outcome: list[Name | Stat | None] = [None] * (stop - start)
        for place in np.flatnonzero(statuses == native.FOUND).tolist():
            mtime_ns = int(items["mtime_ns"][place])
            outcome[place] = Stat(run.file_bytes(start + place), mtime_ns)
            renewed = is_fresh(mtime_ns, quantum)
            self._known.add(addresses[start + place], quantum, renewed=renewed, epoch=epoch)
        missing = np.flatnonzero(statuses == native.ABSENT).tolist()
        if not missing:
            return outcome
        session, names = self._session(), dict[int, Name]()
        for place in missing:
            number = next(self._numbers)
            names[place] = places.staged(session, number)
            self._known.forget(addresses[start + place])
            item = items[place]
            item["number"] = number
            item["incarnation"] = self._incarnation(run, start + place)
            item["mtime_ns"] = stamp_ns(quantum, start + place if depths else 0, hints)
        self._incarnations.record()
        with self._counters.timed("root", "write") as timed:
            run.stage(start, stop, session, durable)
            for place in missing:
                if items["status"][place] == native.DONE:
                    outcome[place] = names[place]
                    timed.size_bytes += int(items["section_count"][place] * items["section_bytes"][place])
        return outcome

    def _incarnation(self, run: Run, index: int) -> Incarnation:
        """Of what comes from images: what was written there, by whomever, is only published now."""
        return self._incarnations.renewed(run.origins[index]) if run.origins else self._incarnations.fresh()

    def map(
        self, run: Run, start: int, stop: int, addresses: Sequence[Address]
    ) -> tuple[npt.NDArray[np.bool_], list[memoryview | None]]:
        """Verified payloads of part of a run, mapped read-only. The rest is ``Chunks.map``'s."""
        epoch = self._known.epoch
        with self._counters.timed("root", "read") as timed:
            mapped = run.map(start, stop)
            done = np.array([payload is not None for payload in mapped], np.bool_)
            timed.size_bytes = self._note(run, start, stop, done, addresses, epoch)
        return done, mapped
