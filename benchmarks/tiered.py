"""A node's tiers without bytes: the real inventories and admission, with each block counted where it moves.

Apart from the program that replays traces (``benchmarks/tiers.py``), because it is the model of a node: what it does at
a get and at a put is MEMORY.md, one request at a time.  Blocks have one size, and rooms count them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvstore.address import Address
from kvstore.hints import DEFAULT, Hints
from kvstore.memory.inventory import Admission, Entry, Inventory, Place

WRITES = ("behind", "through", "uncached")
DEMOTIONS: Mapping[str, int | None] = MappingProxyType({"always": 0, "again": 1, "twice": 2, "never": None})
"""Evicted blocks go from memory to the disk if they were found at least so often since they came into memory."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to run a node. Sizes in blocks; ``drain`` is how many blocks behind the root takes in a second."""

    memory: int
    disk: int
    write: str
    admission: bool
    demotion: str
    dirty_max: int
    drain: float


@dataclass(slots=True)
class Counts:
    """The counts of one run, in blocks."""

    asked: int = 0
    memory: int = 0
    """Found in memory; ``peer``, ``disk`` and ``root`` likewise, each where those before did not have it."""
    peer: int = 0
    disk: int = 0
    root: int = 0
    put: int = 0
    """Found nowhere, so computed and put."""
    shed: int = 0
    """The blocks of these that were not taken: the queue of writes behind, or memory, was full."""
    promoted: int = 0
    """Root to memory; the rest of what the root had is read straight into the caller's arrays."""
    demoted: int = 0
    """Memory to disk."""
    to_root: int = 0
    memory_evicted: int = 0
    disk_evicted: int = 0
    memory_full: int = 0
    """Claims that failed, because all that is in memory is referenced or dirty."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


class Counted:
    """An inventory's ``Room`` of ``size`` blocks, which remembers returned ones."""

    def __init__(self, size: int) -> None:
        self.size_bytes = self.free_bytes = size
        self.given: list[int] = []
        self._last = 0

    def take(self, size_bytes: int) -> int | None:
        """Returns a different number each time; None if it is full."""
        if not self.free_bytes:
            return None
        self.free_bytes -= 1
        self._last += 1
        return self._last

    def give(self, offset: int) -> None:
        """One more block has room."""
        self.free_bytes += 1
        self.given.append(offset)


class Bounded:
    """A bounded tier: an inventory, whose evictions go to ``evicted``."""

    def __init__(self, size: int, evicted: Callable[[Entry], None]) -> None:
        self._room = Counted(size)
        self.inventory = Inventory(self._room)
        self._entries: dict[int, Entry] = {}
        self._evicted = evicted

    def claim(
        self, place: Place, now_s: float, hints: Hints, *, dirty: bool = False, replica: bool = False
    ) -> Entry | None:
        """Makes a ready entry, referenced once; None if there is no room."""
        entry = self.inventory.claim(place, 1, now_s, hints, dirty=dirty, replica=replica)
        for offset in self._room.given:
            self._evicted(self._entries.pop(offset))
        self._room.given.clear()
        if entry is not None:
            self._entries[entry.offset] = entry
            self.inventory.ready(entry)
        return entry


class SimulatedNode:
    """One node: its memory, perhaps a disk, and a root that has all that was ever written to it, shared with peers."""

    def __init__(self, setup: Setup, places: Sequence[Place], hints: Sequence[Hints], root: set[int]) -> None:
        self.counts = Counts()
        self.peers: list[SimulatedNode] = []
        self._setup = setup
        self._places = places
        self._hints = hints
        self._root = root
        self._memory = Bounded(setup.memory, self._demote)
        self._disk = Bounded(setup.disk, self._forget) if setup.disk else None
        self._admission = Admission()
        self._behind: deque[tuple[int, Entry]] = deque()
        self._now_s = 0.0
        self._drainable = 0.0

    def has(self, block: int) -> bool:
        """True if its memory would answer a peer that asks for a block (P2)."""
        return self._memory.inventory.find(self._places[block].address) is not None

    def request(self, now_s: float, chain: Sequence[int]) -> None:
        """A prompt: the leading blocks that are anywhere are got, the others computed and put."""
        self._drain(now_s)
        held: list[Entry] = []
        found = self._get(chain, held)
        self._memory.inventory.used(held, now_s)
        self._put(chain[found:], held)
        for entry in held:
            self._memory.inventory.unrefer(entry)
        self.counts.asked += len(chain)

    def _get(self, chain: Sequence[int], held: list[Entry]) -> int:
        """The number of leading blocks that are there; ``held`` gets those that are in memory now."""
        for index, block in enumerate(chain):
            entry = self._memory.inventory.find(self._places[block].address)
            if entry is not None:
                self._memory.inventory.refer(entry)
                self.counts.memory += 1
            elif not self._below(block, held):
                return index
            if entry is not None:
                held.append(entry)
        return len(chain)

    def _below(self, block: int, held: list[Entry]) -> bool:
        """Gets a block from the first tier below memory that has it; False where none does."""
        address = self._places[block].address
        on_disk = self._disk.inventory.find(address) if self._disk is not None else None
        at_peer = any(peer.has(block) for peer in self.peers)
        from_root = not at_peer and on_disk is None
        if at_peer:
            self.counts.peer += 1
        elif on_disk is not None and self._disk is not None:
            self.counts.disk += 1
            self._disk.inventory.used([on_disk], self._now_s)
        elif block in self._root:
            self.counts.root += 1
        else:
            return False
        if not from_root or self._admits(address):
            entry = self._claim(block, replica=at_peer)
            if entry is not None:
                held.append(entry)
                self.counts.promoted += from_root
        return True

    def _admits(self, address: Address) -> bool:
        return not self._setup.admission or self._admission.asked(address, self._now_s)

    def _put(self, chain: Sequence[int], held: list[Entry]) -> None:
        """New blocks. PutsBehind ones are shed from the first on that finds the queue or memory full (W1)."""
        self.counts.put += len(chain)
        for index, block in enumerate(chain):
            behind = self._setup.write == "behind"
            if behind and len(self._behind) >= self._setup.dirty_max:
                self.counts.shed += len(chain) - index
                return
            entry = self._claim(block, dirty=behind) if self._setup.write != "uncached" else None
            if entry is not None:
                held.append(entry)
            if behind and entry is None:
                self.counts.shed += len(chain) - index
                return
            if behind and entry is not None:
                self._behind.append((block, entry))
            else:
                self._write(block)

    def _claim(self, block: int, *, dirty: bool = False, replica: bool = False) -> Entry | None:
        # A block that was here returns on its next request, the first time: that was its second use.
        self._admission.asked(self._places[block].address, self._now_s)
        entry = self._memory.claim(self._places[block], self._now_s, self._hints[block], dirty=dirty, replica=replica)
        self.counts.memory_full += entry is None
        return entry

    def _write(self, block: int) -> None:
        self._root.add(block)
        self.counts.to_root += 1

    def _drain(self, now_s: float) -> None:
        """Writes what is queued behind, as far as the time since the last request allows."""
        self._drainable += (now_s - self._now_s) * self._setup.drain
        self._now_s = now_s
        while self._behind and self._drainable >= 1:
            block, entry = self._behind.popleft()
            self._write(block)
            self._memory.inventory.clean(entry)
            self._drainable -= 1
        if not self._behind:
            self._drainable = 0.0

    def _demote(self, entry: Entry) -> None:
        self.counts.memory_evicted += 1
        uses_least = DEMOTIONS[self._setup.demotion]
        if self._disk is None or uses_least is None or entry.uses < uses_least:
            return
        if self._disk.inventory.find(entry.place.address) is not None:
            return
        copy = self._disk.claim(entry.place, self._now_s, DEFAULT)
        if copy is not None:
            self._disk.inventory.unrefer(copy)
            self.counts.demoted += 1

    def _forget(self, entry: Entry) -> None:
        self.counts.disk_evicted += 1
