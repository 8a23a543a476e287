"""Runs of chunks that several lanes read or put together: each lane takes the next few again and again, in one call.

So all lanes end at about the same time, with few calls. That matters because Python's own memory has left the
processor's cache by the time the next call needs it (benchmarks/NOTES.md). Called on lanes, except for the
constructors.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.buffers import Borrowed, Withdrawn
from kvstore.format import places
from kvstore.format.places import Name
from kvstore.native import library as native
from kvstore.node.runs import Mask, Run

TURN_NS = 250_000_000
"""Time after which a turn at a put ends, however little it did: a lane that is in one call for ``stall_s`` counts as
hung.
"""

Places = npt.NDArray[np.int32]
"""Offsets of chunks in a run, counted from 0."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of turns, in chunks."""

    step: int
    """Chunks taken at a time, so that lanes end together."""
    most: int
    """Chunks that end a turn, at least ``step``."""
    files: int = 1
    """Files that a reading lane may have open at once; a step may need more."""


class _SharedRun:
    def __init__(self, run: Run, sizes: Sizes) -> None:
        self.run = run
        self._sizes = sizes
        self._next = ctypes.c_int64(0)
        self._header_bytes = int(run.items["header_bytes"].max())
        self._abandoned: ctypes.c_int32 | None = None
        self._start = run.part(run.first, run.first)[0]
        run.items["status"] = native.OTHER

    def stop(self) -> None:
        """Begins no more chunks."""
        self._next.value = self.run.count

    def _turn(self) -> tuple[Any, Places]:
        """Returns what native code needs for a turn, and the memory for the offsets of the chunks that it reports."""
        sizes = self._sizes
        told = np.empty(sizes.most + sizes.step, np.int32)
        at = told.__array_interface__["data"][0]
        taken = ctypes.pointer(self._next)
        files = max(sizes.step, sizes.files)
        turn = native.Turn(taken, sizes.step, sizes.most, files, self._header_bytes, at, time_ns=TURN_NS)
        if self._abandoned is not None:
            turn.abandoned = ctypes.pointer(self._abandoned)
        return turn, told


class SharedRead(_SharedRun):
    """A run on its way into the caller's memory."""

    def read(self, borrowed: Borrowed) -> tuple[list[int], bool, int]:
        """Takes a turn. Raises Withdrawn.

        Returns the offsets of the chunks that it took and that are not right in their sections, whether there may be
        more to read, and the bytes of those that are right.
        """
        run, (turn, told) = self.run, self._turn()
        outcome = native.library.kv_read_turn(run.common, self._start, run.count, turn, borrowed.natively)
        size_bytes, left = turn.bytes, told[: turn.told_count]
        if left.size:
            run.read_blocked(left, borrowed)
            is_read = run.items["status"][left] == native.DONE
            size_bytes += sum(map(run.payload_bytes, left[is_read].tolist()))
            left = left[~is_read]
        if outcome < 0:
            raise Withdrawn
        return left.tolist(), bool(outcome), size_bytes

    def done(self) -> Mask:
        """Returns which chunks are right in their sections."""
        done: Mask = self.run.items["status"] == native.DONE
        return done


class SharedPut(_SharedRun):
    """A run on its way to the root, staged under names of a session.

    After its turn a chunk's status says that it is already there (FOUND), staged (DONE), PUBLISHED, or left to Python.
    Numbers for the names, incarnations and stamps are in the items before the first turn.
    """

    def __init__(
        self,
        run: Run,
        sizes: Sizes,
        session: bytes,
        durable: bool,
        epoch: int,
        abandoned: ctypes.c_int32 | None = None,
    ) -> None:
        """``epoch`` is the epoch of what the node remembers, read before anybody looks at the root.

        With ``abandoned`` a turn publishes what it staged, unless that is set by then.
        """
        super().__init__(run, sizes)
        self._abandoned = abandoned
        self.epoch = epoch
        self._session = session
        self._common = native.Run.from_buffer_copy(run.common)
        self._common.session = session.hex().encode()
        self._common.durable = durable
        self.is_right = bool(run.common.from_images)
        """True if native code compares what it stages with the images that it comes from."""

    def stage(self) -> tuple[Places, bool, int]:
        """Takes a turn. Of a chunk that could not be staged nothing is left.

        Returns the offsets of the chunks that it looked for and staged if they were missing, whether there may be more,
        and the bytes of those that it staged.
        """
        turn, told = self._turn()
        more = native.library.kv_stage_turn(self._common, self._start, self.run.count, turn)
        return told[: turn.told_count], bool(more), turn.bytes

    def publish(self, at: Places, *, ordered: bool) -> None:
        """Gives staged chunks their final names: they become PUBLISHED. The others stay staged, for Python.

        An ``ordered`` call ends with the first of the others. Durable puts are all left to Python, because each
        waits for the device.
        """
        if not self._common.durable:
            listed = at.__array_interface__["data"][0]
            native.library.kv_publish(self._common, self._start, listed, len(at), ordered)

    def taken(self, at: Places) -> npt.NDArray[Any]:
        """Returns the structures of chunks as they are now: their statuses, and the mtimes of those that were FOUND."""
        found: npt.NDArray[Any] = self.run.items[at]
        return found

    def name(self, place: int) -> Name:
        """Returns the name under which a chunk is staged."""
        return places.staged(self._session, int(self.run.items["number"][place]))
