"""Finds chunks without a parent: 32 bytes of memory for each chunk, up to a limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.address import ADDRESS_BYTES, NO_PARENT, Address
from kvstore.format.places import Name


class Reach:
    """Collects chunks while they are walked over; gives up, and frees what it has, beyond ``chunks_max``."""

    def __init__(self, chunks_max: int) -> None:
        self._chunks_max = chunks_max
        self._addresses: bytearray | None = bytearray()
        self._parents = bytearray()
        self._folders: list[tuple[int, str]] = []

    def add(self, name: Name, address: Address, parent: Address | None) -> None:
        """One chunk; ``parent`` is None for a block, which has none."""
        if self._addresses is None:
            return
        count = len(self._addresses) // ADDRESS_BYTES
        if count >= self._chunks_max:
            self._addresses, self._parents = None, bytearray()
            return
        self._addresses += address
        self._parents += NO_PARENT if parent is None else parent
        # A name is its folder, its address and its namespace: the folder and namespace repeat, so runs are kept.
        folder, _, last = name.rpartition("/")
        shape = f"{folder}/{{}}.{last.partition('.')[2]}"
        if not self._folders or self._folders[-1][1] != shape:
            self._folders.append((count, shape))

    def unreachable(self) -> list[tuple[Name, Address]] | None:
        """Name and parent of each chunk whose parent is not there; None beyond the limit."""
        if self._addresses is None:
            return None
        addresses, parents = _array(self._addresses), _array(self._parents)
        lost = np.flatnonzero(~np.isin(parents, addresses) & (parents != np.bytes_(NO_PARENT)))
        starts = [start for start, _ in self._folders]
        return [
            (
                Name(
                    self._folders[int(np.searchsorted(starts, index, side="right")) - 1][1].format(
                        self._at(self._addresses, int(index)).hex()
                    )
                ),
                self._at(self._parents, int(index)),
            )
            for index in lost
        ]

    @staticmethod
    def _at(packed: bytearray, index: int) -> Address:
        return Address(bytes(packed[index * ADDRESS_BYTES : (index + 1) * ADDRESS_BYTES]))


def _array(packed: bytearray) -> npt.NDArray[Any]:
    # numpy ignores zeros at the end of such items, which is harmless where all have the same length.
    return np.frombuffer(packed, dtype=f"S{ADDRESS_BYTES}") if packed else np.empty(0, dtype=f"S{ADDRESS_BYTES}")
