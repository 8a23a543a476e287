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

from kvstore.core.address import ADDRESS_BYTES, Address
from kvstore.core.buffers import untouched_zeros
from kvstore.core.clock import Clock
from kvstore.core.recency import NS_PER_S, TICK_S
from kvstore.native import library as native

FORGOTTEN_MAX = 64
SPAN = 1 << 12
"""Rows searched for marks at a time: numpy's temporary arrays stay in the CPU cache."""


class PresenceCache:
    """Maps an address to the quantum in which it was last seen, and to whether its recency was renewed in it.

    A set-associative table of fixed size: the first 8 bytes of an address (a keyed hash, so evenly spread) choose a row
    of 8 entries and are what is compared. An entry takes 12 bytes. All are allocated at the start, so that traffic
    cannot exceed them; the system gives memory to those in use. A full row drops the entry seen longest ago.

    Rule H3: a look that began before a sweep condemned must not be remembered after it. So the caller reads ``epoch``
    before it looks, and ``add`` takes the finding only if the epoch is still the same; forgetting a shard begins a new
    epoch. Readers race with that: an entry that is being dropped can still be found, as if the look had come earlier.
    """

    __slots__ = (
        *("_clock", "_forgotten", "_lock", "_marks", "_prints", "_table"),
        *("epoch", "quantum_s"),
    )

    def __init__(self, entries_max: int, quantum_s: int, clock: Clock) -> None:
        rows = 1 << max(0, (entries_max // native.WAYS).bit_length() - 1)
        self._clock = clock
        self.quantum_s = quantum_s
        """Length of a quantum. A mark holds a quantum as its start divided by this, which fits 31 bits."""
        self._lock = threading.Lock()
        self.epoch = 0
        self._forgotten: deque[tuple[int, npt.NDArray[Any]]] = deque(maxlen=FORGOTTEN_MAX)
        """The chunks that ``forget_each`` forgot, and their epochs."""
        self._prints = untouched_zeros((rows, native.WAYS), np.uint64)
        self._marks = untouched_zeros((rows, native.WAYS), np.uint32)
        self._table = native.PresenceTable(self._prints.ctypes.data, self._marks.ctypes.data, rows - 1)

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
        return bool(self.present((address,), quantum_start_s)[0])

    def add(self, address: Address, quantum_start_s: int, *, renewed: bool, epoch: int) -> None:
        """Notes that it was seen in this quantum by a look that began in ``epoch``; ``renewed`` if its stamp is too."""
        self.add_all((address,), quantum_start_s, renewed=renewed, epoch=epoch)

    def add_all(
        self, addresses: Sequence[Address], quantum_start_s: int, *, renewed: bool | npt.NDArray[np.bool_], epoch: int
    ) -> None:
        """Adds many addresses; ``renewed`` is one value, or one for each."""
        chunks = _chunks_of(b"".join(addresses))
        chunks["mtime_ns"] = np.where(renewed, quantum_start_s * NS_PER_S, -1)
        self.add_run(chunks.ctypes.data, len(chunks), native.DONE, quantum_start_s, epoch=epoch)

    def add_run(
        self, chunks: int, places: int | npt.NDArray[np.int32], status: int, quantum_start_s: int, *, epoch: int
    ) -> tuple[int, int]:
        """Adds those of native code's chunks that have a status; the first chunk is at address ``chunks``.

        ``places`` are their offsets, or how many there are. Chunks whose mtime is of this quantum count as renewed.
        Returns how many have the status, and the bytes of their sections, also if the epoch has changed and none is
        added.
        """
        section_bytes = ctypes.c_uint64()
        mark, renewed_ns = quantum_start_s // self.quantum_s << 1, quantum_start_s * NS_PER_S
        with self._lock:
            table = self._table if self._counts(epoch) else None
            found: int = native.brief.kv_known_add(
                table, chunks, *_listed(places), status, mark, renewed_ns, ctypes.addressof(section_bytes)
            )
            if epoch != self.epoch:
                for forgotten, each in self._forgotten:
                    if forgotten > epoch:
                        self._forget(each.ctypes.data, len(each), native.DONE)
        return found, section_bytes.value

    def forget_run(self, chunks: int, places: npt.NDArray[np.int32], status: int) -> None:
        with self._lock:
            self._forget(chunks, places, status)

    def forget(self, address: Address) -> None:
        chunks = _chunks_of(address)
        with self._lock:
            self._forget(chunks.ctypes.data, 1, native.DONE)

    def forget_each(self, packed: bytes) -> None:
        """Forgets chunks by their addresses, one after the other. Looks under way must not bring them back."""
        chunks = _chunks_of(packed)
        with self._lock:
            self.epoch += 1
            self._forgotten.append((self.epoch, chunks))
            self._forget(chunks.ctypes.data, len(chunks), native.DONE)

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
        """True if all that was forgotten after ``epoch`` is in ``_forgotten``."""
        return epoch == self.epoch or (bool(self._forgotten) and self._forgotten[0][0] <= epoch + 1)

    def _forget(self, chunks: int, places: int | npt.NDArray[np.int32], status: int) -> None:
        native.brief.kv_known_forget(self._table, chunks, *_listed(places), status)

    def _marked(self) -> Iterator[slice]:
        """Yields the spans of rows that have marks. What was never written to stays without memory."""
        for start in range(0, len(self._marks), SPAN):
            span = slice(start, start + SPAN)
            if self._marks[span].max():  # several times as fast as any()
                yield span

    def _have_mark(self, packed: bytes, least: int, bit: int) -> npt.NDArray[np.bool_]:
        """Returns which addresses have a mark of at least ``least`` that has ``bit`` set."""
        found = np.empty(len(packed) // ADDRESS_BYTES, np.bool_)
        at = found.__array_interface__["data"][0]
        native.brief.kv_known_have(self._table, packed, len(found), least, bit, at)
        return found


def _chunks_of(packed: bytes) -> npt.NDArray[Any]:
    """Returns the structures of chunks that are known by their addresses alone."""
    chunks = np.zeros(len(packed) // ADDRESS_BYTES, native.CHUNK)
    chunks["address"] = np.frombuffer(packed, "V16")
    return chunks


def _listed(places: int | npt.NDArray[np.int32]) -> tuple[int | None, int]:
    """Returns where the offsets are, None for all from 0 on, and how many there are, for native code."""
    if isinstance(places, int):
        return None, places
    assert places.dtype == np.int32 and places.flags.c_contiguous
    return places.__array_interface__["data"][0], len(places)
