"""What this node remembers to be present, so that a repeated match costs no file-system look-up.

A memory, not a truth: an entry is trusted for the quantum it was made in and the next, and whoever finds a chunk gone
forgets it.  Being wrong costs a miss at the read, never a wrong byte.
"""

from __future__ import annotations

from kvstore.address import Address


class Known:
    """Address to the quantum in which it was last seen, and whether its recency was renewed in it.

    Two generations instead of a linked list: when the younger is full the older is dropped, so that memory stays
    bounded and a look-up is one or two dictionary reads.  Single operations on a dictionary are atomic, which is all
    this needs.
    """

    __slots__ = ("_generation_max", "_old", "_quantum_s", "_young")

    def __init__(self, entries_max: int, quantum_s: int) -> None:
        self._generation_max = max(1, entries_max // 2)
        self._quantum_s = quantum_s
        self._young: dict[Address, int] = {}
        self._old: dict[Address, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def is_present(self, address: Address, quantum_start_s: int) -> bool:
        """Whether it was seen in this quantum or the one before."""
        return self._seen(address) >> 1 >= quantum_start_s - self._quantum_s

    def is_renewed(self, address: Address, quantum_start_s: int) -> bool:
        """Whether its recency is known to be of this quantum."""
        seen = self._seen(address)
        return bool(seen & 1) and seen >> 1 >= quantum_start_s

    def add(self, address: Address, quantum_start_s: int, *, renewed: bool) -> None:
        """It was seen in this quantum; ``renewed`` if its stamp is of this quantum too."""
        if len(self._young) >= self._generation_max and address not in self._young:
            self._old, self._young = self._young, {}
        renewed = renewed or self.is_renewed(address, quantum_start_s)
        self._young[address] = quantum_start_s << 1 | renewed

    def forget(self, address: Address) -> None:
        """It is not there, or not what it should be."""
        self._young.pop(address, None)
        self._old.pop(address, None)

    def clear(self) -> None:
        """Forgets everything."""
        self._young, self._old = {}, {}

    def leading_count(self, addresses: tuple[Address, ...], quantum_start_s: int) -> int:
        """How many leading addresses are remembered as present."""
        oldest = (quantum_start_s - self._quantum_s) << 1
        young, old = self._young, self._old
        for count, address in enumerate(addresses):
            seen = young.get(address)
            if seen is None:
                seen = old.get(address, -1)
            if seen < oldest:
                return count
        return len(addresses)

    def _seen(self, address: Address) -> int:
        seen = self._young.get(address)
        return self._old.get(address, -1) if seen is None else seen
