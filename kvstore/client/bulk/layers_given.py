"""Layers of held chunks out of the memory, or the open files, of a worker on this host: one copy of each byte.

All chunks are asked for at once, and then the connection is free: slots stay under their lease, and files are ours.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.address import Chain
from kvstore.buffers import Borrowed
from kvstore.client.bulk.given import GivenFiles, GivenSlots, Giving
from kvstore.client.bulk.handed import images_of
from kvstore.client.bulk.lanes import FileLanes
from kvstore.client.bulk.layers import started
from kvstore.client.bulk.links import Link
from kvstore.client.bulk.memory import Lease
from kvstore.errors import InvalidRequest
from kvstore.format.header import Damaged, expected_chunk
from kvstore.native import is_available
from kvstore.node.counters import Counters
from kvstore.node.images import addresses_of, fill, read_header, verify
from kvstore.node.lanes import Deadline, files_at_most, group_size
from kvstore.node.layer_run import LayerRun
from kvstore.node.layers import LIMIT_PER_READ
from kvstore.node.reader import Groups, Reading
from kvstore.results import LayerMemory
from kvstore.root.interface import LocalFiles, Stat
from kvstore.root.posix_reader import PosixReader
from kvstore.wire.bulk.frames import Mode

FILES_MAX = 1024
"""Open files that one read keeps at most, if the process may have four times as many."""


class GivenLayers:
    """The chunks of a hold, all within reach of this process. Close it. Made by ``of``."""

    def __init__(
        self, link: Link, chain: Chain, slots: list[GivenSlots], files: list[GivenFiles], lanes: FileLanes
    ) -> None:
        """Takes over the files, and keeps the lease of the slots."""
        self._chain = chain
        self._leases: list[Lease] = [each.lease for each in slots[:1]]
        count, images = len(chain), np.zeros(len(chain), np.uint64)
        self._mapped = [images_of(link, chain, each) for each in slots]
        for given, mapped in zip(slots, self._mapped, strict=True):
            images[given.first : given.first + given.count] = addresses_of(mapped)
        given_files = [fd for each in files for fd in each.files]
        self._never_blocks = all(map(link.never_blocks, given_files))
        # Copying within memory needs no lanes that may wait for a root, and the thread that waits does a share of it.
        self._lanes = lanes.get() if files else lanes.copiers()
        self._size = group_size(count, 2 * chain.namespace.layout.section_bytes, self._lanes.width)
        local = LocalFiles("", self._never_blocks, stages=False, direct=False) if files else None
        self._run = LayerRun(chain, images, local, 0, self._size, count)
        places = [at for each in files for at in range(each.first, each.first + each.count)]
        self._run.give(places, given_files)
        self._lock = threading.Lock()  # guards who may begin to read
        self._reading: Reading | None = None
        self._withdrawn = False
        for each in files:
            each.files.clear()

    @classmethod
    def of(
        cls, link: Link, hold_id: bytes, count: int, chain: Callable[[], Chain], lanes: FileLanes, idle_s: float
    ) -> GivenLayers | None:
        """Asks for the ``count`` chunks of a hold, which ``chain`` returns; None if not all of them can be had so.

        Raises HoldBroken, BulkRefused, LinkBroken, LinkLate.
        """
        if not is_available() or (link.memory is not None and not link.memory.has_lease):
            return None
        mode, files_left = link.mode, files_at_most(FILES_MAX, LIMIT_PER_READ)
        if mode is Mode.STREAM or (mode is Mode.FILES and count > files_left):
            return None
        number, found = started(link, hold_id, count, mode, idle_s), 0
        slots: list[GivenSlots] = []
        files: list[GivenFiles] = []
        try:
            with Giving(link, number, mode) as giving:
                for given in giving.each(0, count):
                    if isinstance(given, GivenFiles):
                        files.append(given)
                        files_left -= given.count
                    elif isinstance(given, GivenSlots):
                        slots.append(given)
                    else:
                        break
                    found += given.count
                    if files_left < 0:
                        break
                is_whole = found == count and files_left >= 0
                giving.finish(count if is_whole else 0, keep=is_whole and bool(slots))
            return cls(link, chain(), slots, files, lanes) if is_whole else None
        except InvalidRequest as error:
            raise link.channel.break_off(str(error)) from error
        finally:
            for each in files:
                each.close()

    def read(self, layers: range, memories: Sequence[LayerMemory], deadline: Deadline) -> bool:
        """Reads some layers; False if a chunk is damaged, or did not come in time. Nobody writes into memory then."""
        self._run.begin(0, memories)
        size, count = self._chain.namespace.layout.section_bytes, len(self._chain)

        def read_group(start: int, stop: int, borrowed: Borrowed) -> npt.NDArray[np.bool_]:
            return self._run.read(start, stop, 0, layers.start, borrowed)[0]

        def read_one(index: int, borrowed: Borrowed) -> bool:
            part = slice(index * size, (index + 1) * size)
            sections = [plane[part] for each in memories for plane in (each.k, each.v)]
            return self._read_file(index, 2 * layers.start, sections, borrowed)

        groups = Groups(self._size, count, read_group)
        with self._lock:
            if self._withdrawn:
                return False
            reading = Reading(self._lanes, Counters(), count, read_one, groups=groups, helps=not self._run.has_files)
            self._reading = reading
        try:
            return all(reading.wait(deadline))
        finally:
            reading.withdraw()  # after an interrupt (Ctrl-C) lanes may still be writing into the caller's memory

    def withdraw(self) -> None:
        """Takes all memory back, from any thread: returns when nobody writes into it, and nobody will."""
        with self._lock:
            self._withdrawn, reading = True, self._reading
        if reading is not None:
            reading.withdraw()

    def close(self) -> None:
        """Closes files and lease. Idempotent."""
        self._run.close()
        for lease in self._leases:
            lease.close()

    def _read_file(self, index: int, first: int, sections: list[memoryview], borrowed: Borrowed) -> bool:
        """Reads sections from ``first`` on of one chunk whose file is not cached. Raises Withdrawn."""
        expected = expected_chunk(self._chain, index)
        with self._run.using(index):  # which keeps the file open
            fd = int(self._run.fds[index])
            if fd < 0:
                return False
            reader = PosixReader(fd, f"of chunk {index}, as handed over", Stat(0, 0), self._never_blocks)
            try:
                header = read_header(reader, expected)
                fill(reader, sections, header.header_bytes + first * header.section_bytes, borrowed)
                verify(sections, header.checksums[first : first + len(sections)])
            except Damaged:
                return False
        return True
