"""What this node remembers to be present, so that a repeated match costs no file-system look-up.

A memory, not a truth: an entry is trusted for the quantum it was made in and the next, and whoever finds a chunk gone
forgets it.  Being wrong costs a miss at the read, never a wrong byte.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.address import Address

WAYS = 8
BYTES_PER_ENTRY = 12


class Known:
    """Address to the quantum in which it was last seen, and whether its recency was renewed in it.

    A set-associative table of fixed size: the first 8 bytes of an address (a keyed hash, so evenly spread) choose a row
    of 8 entries and are what is compared.  12 bytes an entry, all of them allocated at the start, so that a node's
    memory does not depend on what passes through it.  A full row drops the entry seen longest ago.

    Rule H3: what was looked at before a sweep condemned must not be remembered after it.  So whoever looks notes
    ``epoch`` first, and ``add`` takes the finding only if the epoch is still the same; forgetting a shard begins a new
    one.  Readers race with that: an entry that is being dropped can still be found, as if the look had come earlier.
    """

    __slots__ = ("_lock", "_marks", "_mask", "_prints", "_quantum_s", "epoch")

    def __init__(self, entries_max: int, quantum_s: int) -> None:
        rows = 1 << max(0, (entries_max // WAYS).bit_length() - 1)
        self._mask = rows - 1
        self._quantum_s = quantum_s
        self._lock = threading.Lock()
        self.epoch = 0
        self._prints = np.zeros((rows, WAYS), np.uint64)
        self._marks = np.zeros((rows, WAYS), np.uint32)
        self._prints.fill(0)
        self._marks.fill(0)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._marks))

    def is_present(self, address: Address, quantum_start_s: int) -> bool:
        """Whether it was seen in this quantum or the one before."""
        return self._mark(address) >> 1 >= self._number(quantum_start_s) - 1

    def is_renewed(self, address: Address, quantum_start_s: int) -> bool:
        """Whether its recency is known to be of this quantum."""
        mark = self._mark(address)
        return bool(mark & 1) and mark >> 1 >= self._number(quantum_start_s)

    def add(self, address: Address, quantum_start_s: int, *, renewed: bool, epoch: int) -> None:
        """It was seen in this quantum, by a look that began in ``epoch``; ``renewed`` if its stamp is of it too."""
        number = self._number(quantum_start_s)
        with self._lock:
            if epoch != self.epoch:
                return
            row, at, mark = self._find(address)
            if at < 0:
                at = int(self._marks[row].argmin())
            elif mark & 1 and mark >> 1 >= number:
                return
            self._prints[row, at] = _print(address)
            self._marks[row, at] = number << 1 | renewed

    def forget(self, address: Address) -> None:
        """It is not there, or not what it should be."""
        with self._lock:
            row, at, _ = self._find(address)
            if at >= 0:
                self._marks[row, at] = 0

    def forget_shards(self, shards: Sequence[int], shard_bits: int) -> None:
        """Sweeps condemn in these shards: forgets all of them, and what is being looked at anywhere."""
        condemned = np.zeros(1 << shard_bits, np.bool_)
        condemned[list(shards)] = True
        with self._lock:
            self.epoch += 1
            # The first 16 bits of an address, as ``places.shard`` takes them, are the low ones of a print, swapped.
            heads = (self._prints & np.uint64(0xFFFF)).astype(np.uint16).byteswap()
            self._marks[condemned[heads >> (16 - shard_bits)]] = 0

    def clear(self) -> None:
        """Forgets everything, and what is being looked at."""
        with self._lock:
            self.epoch += 1
            self._marks.fill(0)

    def leading_count(self, addresses: Sequence[Address], quantum_start_s: int) -> int:
        """How many leading addresses are remembered as present."""
        if not addresses:
            return 0
        oldest = max(0, self._number(quantum_start_s) - 1) << 1
        present = self._have_mark(addresses, max(oldest, 1), 0)
        return len(addresses) if present.all() else int(present.argmin())

    def unrenewed(self, addresses: Sequence[Address], quantum_start_s: int) -> list[int]:
        """The places in ``addresses`` whose recency is not known to be of this quantum."""
        if not addresses:
            return []
        renewed = self._have_mark(addresses, self._number(quantum_start_s) << 1, 1)
        places: list[int] = np.flatnonzero(~renewed).tolist()
        return places

    def _have_mark(self, addresses: Sequence[Address], least: int, bit: int) -> npt.NDArray[Any]:
        """Which of the addresses have a mark of at least ``least`` that has ``bit`` set."""
        prints = np.frombuffer(b"".join(addresses), "<u8")[::2]
        rows = (prints & np.uint64(self._mask)).astype(np.intp)
        marks = self._marks[rows]
        fits = (self._prints[rows] == prints[:, None]) & (marks >= least) & (marks & bit == bit)
        found: npt.NDArray[Any] = fits.any(axis=1)
        return found

    def _number(self, quantum_start_s: int) -> int:
        """The quantum's number, small enough for 31 bits."""
        return quantum_start_s // self._quantum_s

    def _mark(self, address: Address) -> int:
        return self._find(address)[2]

    def _find(self, address: Address) -> tuple[int, int, int]:
        """Row, place in it (-1 where it is not known) and mark."""
        wanted = _print(address)
        row = wanted & self._mask
        prints, marks = self._prints[row].tolist(), self._marks[row].tolist()
        for at, (found, mark) in enumerate(zip(prints, marks, strict=True)):
            if found == wanted and mark:
                return row, at, mark
        return row, -1, 0


def _print(address: Address) -> int:
    return int.from_bytes(address[:8], "little")
