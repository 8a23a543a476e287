"""The chunks that this node remembers as present, so that a repeated match costs no file-system look-up.

A memory, not the truth: an entry is trusted for the quantum it was made in and the next, and a reader that finds a
chunk gone forgets it. A wrong entry costs a miss at the read, never a wrong byte.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.address import ADDRESS_BYTES, Address
from kvstore.native import library as native
from kvstore.recency import NS_PER_S, TICK_S
from kvstore.sources import Clock
from kvstore.zeros import untouched_zeros

WAYS = 8
RUN = 1024
"""Addresses looked up at once: numpy's temporary arrays stay in the cache."""
RUN_MIN = 32
"""Below this many, adding one by one is faster."""
FORGOTTEN_MAX = 64
SPAN = 1 << 12
"""Rows looked through at once for marks: numpy's temporary arrays stay in the cache."""


class Known:
    """Maps an address to the quantum in which it was last seen, and to whether its recency was renewed in it.

    A set-associative table of fixed size: the first 8 bytes of an address (a keyed hash, so evenly spread) choose a row
    of 8 entries and are what is compared. An entry takes 12 bytes. All are allocated at the start, so that traffic
    cannot exceed them; the system gives memory to those in use. A full row drops the entry seen longest ago.

    Rule H3: a look that began before a sweep condemned must not be remembered after it. So the caller reads ``epoch``
    before it looks, and ``add`` takes the finding only if the epoch is still the same; forgetting a shard begins a new
    epoch. Readers race with that: an entry that is being dropped can still be found, as if the look had come earlier.
    """

    __slots__ = (
        *("_clock", "_forgotten", "_lock", "_mark_at", "_marks", "_mask", "_print_at", "_prints", "_table"),
        *("epoch", "quantum_s"),
    )

    def __init__(self, entries_max: int, quantum_s: int, clock: Clock) -> None:
        rows = 1 << max(0, (entries_max // WAYS).bit_length() - 1)
        self._mask = rows - 1
        self._clock = clock
        self.quantum_s = quantum_s
        """Length of a quantum. A mark holds a quantum as its start divided by this, which fits 31 bits."""
        self._lock = threading.Lock()
        self.epoch = 0
        self._forgotten: deque[tuple[int, npt.NDArray[np.uint64]]] = deque(maxlen=FORGOTTEN_MAX)
        """The prints that ``forget_each`` forgot, and their epochs."""
        self._prints = untouched_zeros((rows, WAYS), np.uint64)
        self._marks = untouched_zeros((rows, WAYS), np.uint32)
        # The same memory, entry by entry: for one address numpy costs more than the look.
        self._print_at = self._prints.reshape(-1).data
        self._mark_at = self._marks.reshape(-1).data
        self._table = native.Known(self._prints.ctypes.data, self._marks.ctypes.data, self._mask)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._marks))

    def tick(self) -> float:
        """Returns the start of the current tick: the time that the stamps of a put have."""
        return max(0.0, self._clock.now_s()) // TICK_S * TICK_S

    def quantum(self, ago_s: float = 0.0) -> int:
        """Returns the start of the current quantum, or of that of ``ago_s`` seconds ago."""
        return int(max(0.0, self._clock.now_s() - ago_s)) // self.quantum_s * self.quantum_s  # as ``quantum_of``

    def is_present(self, address: Address, quantum_start_s: int) -> bool:
        """True if it was seen in this quantum or the one before."""
        return self._mark(address) >> 1 >= quantum_start_s // self.quantum_s - 1

    def add(self, address: Address, quantum_start_s: int, *, renewed: bool, epoch: int) -> None:
        """Notes that it was seen in this quantum by a look that began in ``epoch``; ``renewed`` if its stamp is too."""
        wanted = _print(address)
        with self._lock:
            if self._counts(epoch) and not any((prints == wanted).any() for prints in self._since(epoch)):
                self._add(wanted, quantum_start_s // self.quantum_s << 1 | renewed)

    def add_all(
        self, addresses: Sequence[Address], quantum_start_s: int, *, renewed: bool | npt.NDArray[np.bool_], epoch: int
    ) -> None:
        """Adds many at once; ``renewed`` may be one value or one for each."""
        prints, rows = self._places(b"".join(addresses))
        marks = np.full(len(prints), quantum_start_s // self.quantum_s << 1, np.uint32) | renewed
        for start in range(0, len(prints), RUN):
            run = slice(start, start + RUN)
            with self._lock:
                if not self._counts(epoch):
                    return
                alone: Sequence[int] = range(len(prints))
                if len(prints) >= RUN_MIN:
                    alone = self._add_run(prints[run], rows[run], marks[run])
                for index in alone:
                    self._add(int(prints[start + index]), int(marks[start + index]))
                self._forget_since(epoch)

    def add_run(
        self, chunks: int, places: npt.NDArray[np.int32], status: int, quantum_start_s: int, *, epoch: int
    ) -> tuple[int, int]:
        """Adds those of native code's chunks that have a status; the first chunk is at address ``chunks``.

        Chunks whose mtime is of this quantum count as renewed. Returns how many have the status, and the bytes of their
        sections, also if the epoch has changed and none is added.
        """
        section_bytes = ctypes.c_uint64()
        mark, renewed_ns = quantum_start_s // self.quantum_s << 1, quantum_start_s * NS_PER_S
        with self._lock:
            table = self._table if self._counts(epoch) else None
            found = native.brief.kv_known_add(
                table, chunks, *_listed(places), status, mark, renewed_ns, ctypes.byref(section_bytes)
            )
            self._forget_since(epoch)
        return found, section_bytes.value

    def forget_run(self, chunks: int, places: npt.NDArray[np.int32], status: int) -> None:
        """Forgets those of native code's chunks that have a status."""
        with self._lock:
            native.brief.kv_known_forget(self._table, chunks, *_listed(places), status)

    def forget(self, address: Address) -> None:
        """Notes that it is not there, or not what it should be."""
        with self._lock:
            entry, _ = self._find(_print(address))
            if entry >= 0:
                self._mark_at[entry] = 0

    def forget_each(self, packed: bytes) -> None:
        """Forgets chunks by their addresses, one after the other. Looks under way must not bring them back."""
        prints = np.frombuffer(packed, "<u8")[::2]
        with self._lock:
            self.epoch += 1
            self._forgotten.append((self.epoch, prints))
            self._forget(prints)

    def forget_shards(self, shards: Sequence[int], shard_bits: int) -> None:
        """Forgets all chunks of these shards, in which sweeps condemn, and ends the epoch of all looks under way."""
        condemned = np.zeros(1 << shard_bits, np.bool_)
        condemned[list(shards)] = True
        with self._lock:
            self.epoch += 1
            self._forgotten.clear()
            for span in self._marked():
                # The first 16 bits of an address, as ``places.shard`` takes them, are the low ones of a print, swapped.
                heads = (self._prints[span] & np.uint64(0xFFFF)).astype(np.uint16).byteswap()
                self._marks[span][condemned[heads >> (16 - shard_bits)]] = 0

    def clear(self) -> None:
        """Forgets everything, and ends the epoch of all looks under way."""
        with self._lock:
            self.epoch += 1
            self._forgotten.clear()
            for span in self._marked():
                self._marks[span] = 0

    def leading_count(self, packed: bytes, quantum_start_s: int) -> int:
        """Returns how many leading addresses, one after the other in ``packed``, are remembered as present."""
        if not packed:
            return 0
        # Not by ``present``: each call fewer counts for short prompts.
        present = self._have_mark(packed, max(quantum_start_s // self.quantum_s - 1 << 1, 1), 0)
        return len(present) if present.all() else int(present.argmin())

    def present(self, addresses: Sequence[Address], quantum_start_s: int) -> npt.NDArray[np.bool_]:
        """Returns which addresses are remembered as present."""
        return self._have_mark(b"".join(addresses), max(quantum_start_s // self.quantum_s - 1 << 1, 1), 0)

    def unrenewed(self, packed: bytes, quantum_start_s: int) -> list[int]:
        """Returns the positions in ``packed`` of the addresses whose recency is not known to be of this quantum."""
        if not packed:
            return []
        renewed = self._have_mark(packed, quantum_start_s // self.quantum_s << 1, 1)
        places: list[int] = np.flatnonzero(~renewed).tolist()
        return places

    def _counts(self, epoch: int) -> bool:
        """True if all that was forgotten after ``epoch`` is known by print."""
        return epoch == self.epoch or (bool(self._forgotten) and self._forgotten[0][0] <= epoch + 1)

    def _since(self, epoch: int) -> Iterator[npt.NDArray[np.uint64]]:
        """Yields the prints that were forgotten after ``epoch``."""
        return (prints for forgotten, prints in self._forgotten if forgotten > epoch)

    def _forget_since(self, epoch: int) -> None:
        if epoch != self.epoch:
            for prints in self._since(epoch):
                self._forget(prints)

    def _forget(self, prints: npt.NDArray[np.uint64]) -> None:
        rows = (prints & np.uint64(self._mask)).astype(np.intp)
        fits = self._prints.take(rows, axis=0) == prints[:, None]
        at, way = np.nonzero(fits)
        self._marks[rows[at], way] = 0

    def _marked(self) -> Iterator[slice]:
        """Yields the spans of rows that have marks. What was never written to stays without memory."""
        for start in range(0, len(self._marks), SPAN):
            span = slice(start, start + SPAN)
            if self._marks[span].max():  # several times as fast as any()
                yield span

    def _have_mark(self, packed: bytes, least: int, bit: int) -> npt.NDArray[np.bool_]:
        """Returns which addresses have a mark of at least ``least`` that has ``bit`` set."""
        if native.brief is None:
            return self._have_mark_in_numpy(packed, least, bit)
        found = np.empty(len(packed) // ADDRESS_BYTES, np.bool_)
        at = found.__array_interface__["data"][0]
        native.brief.kv_known_have(self._table, packed, len(found), least, bit, at)
        return found

    def _have_mark_in_numpy(self, packed: bytes, least: int, bit: int) -> npt.NDArray[np.bool_]:
        prints, rows = self._places(packed)
        found = np.empty(len(rows), np.bool_)
        for start in range(0, len(rows), RUN):
            run = slice(start, start + RUN)
            # Read marks before prints, because writers set prints before marks: else an address whose entry another one
            # is taking over just now would be found with the other's mark.
            marks = self._marks.take(rows[run], axis=0)
            fits = self._prints.take(rows[run], axis=0) == prints[run, None]
            fits &= marks >= least
            if bit:
                fits &= marks & bit == bit
            found[run] = _any(fits)
        return found

    def _places(self, packed: bytes) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.intp]]:
        """Returns the prints and rows of addresses."""
        prints = np.frombuffer(packed, "<u8")[::2]
        return prints, (prints & np.uint64(self._mask)).astype(np.intp)

    def _mark(self, address: Address) -> int:
        return self._find(_print(address))[1]

    def _find(self, wanted: int) -> tuple[int, int]:
        """Returns the entry of a print, -1 if it has none, and its mark, 0 if it is forgotten."""
        start = (wanted & self._mask) * WAYS
        marks = self._mark_at[start : start + WAYS].tolist()  # before prints, as in _have_mark
        prints = self._print_at[start : start + WAYS].tolist()
        if wanted not in prints:
            return -1, 0
        at = prints.index(wanted)
        return start + at, marks[at]

    def _add_run(
        self, prints: npt.NDArray[np.uint64], rows: npt.NDArray[np.intp], marks: npt.NDArray[np.uint32]
    ) -> Sequence[int]:
        """Adds each one that is the only one to want its entry; returns the positions of the others.

        An address that occurs twice wants its entry twice, and two new ones in a row want the same entry.
        """
        found = self._prints.take(rows, axis=0) == prints[:, None]
        is_new = ~_any(found)
        at = found.argmax(axis=1)
        at[is_new] = self._marks.take(rows[is_new], axis=0).argmin(axis=1)
        entries, first = np.unique(rows * WAYS + at, return_index=True)
        cells, fresh = self._marks.reshape(-1), marks[first]
        before = np.where(is_new[first], np.uint32(0), cells[entries])
        self._prints.reshape(-1)[entries] = prints[first]
        cells[entries] = np.where(_stays(before, fresh), before, fresh)
        others = np.ones(len(prints), np.bool_)
        others[first] = False
        left: list[int] = np.flatnonzero(others).tolist()
        return left

    def _add(self, wanted: int, mark: int) -> None:
        entry, before = self._find(wanted)
        if entry < 0:
            start = (wanted & self._mask) * WAYS
            marks = self._mark_at[start : start + WAYS].tolist()
            entry = start + marks.index(min(marks))
        elif _stays(before, mark):
            return
        self._print_at[entry] = wanted
        self._mark_at[entry] = mark


def _listed(places: npt.NDArray[np.int32]) -> tuple[int, int]:
    """Returns where the numbers are and how many there are, for native code."""
    assert places.dtype == np.int32 and places.flags.c_contiguous
    return places.__array_interface__["data"][0], len(places)


def _print(address: Address) -> int:
    return int.from_bytes(address[:8], "little")


def _stays(before: Any, mark: Any) -> Any:
    """True if an entry keeps its mark: it is renewed, in the quantum of the new mark or later. Takes arrays too."""
    return (before & 1) * (before >= mark)


def _any(fits: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Returns whether any entry of each row fits: reading its 8 bytes as one number is 50 times faster in numpy."""
    found: npt.NDArray[np.bool_] = fits.view(np.uint64)[:, 0] != 0
    return found
