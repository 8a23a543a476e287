"""The pins in force, by their owners' journals, and whether their chunks are on the root.

A pin outlives its process, so another one has to look.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from kvstore.format import places
from tests.chaos.journal import Journals
from tests.chaos.prompts import LAYOUT, SPACE, chain_of, chunk_bytes


@dataclass(frozen=True, slots=True)
class LivePin:
    """An acknowledged pin on the leading chunks of a prompt, in force until ``until_s`` (monotonic)."""

    id: str
    number: int
    chunks_count: int
    until_s: float


@dataclass(frozen=True, slots=True)
class Broken:
    """A fault of one chunk of a pin."""

    pin: LivePin
    index: int
    name: str
    why: str
    is_wrong: bool
    """True if it has wrong bytes; else it is missing."""


class LivePins:
    """Reads the journals and the root; takes no part in the cluster."""

    def __init__(self, root: Path, shard_bits: int, journals: Path) -> None:
        self._root = root
        self._shard_bits = shard_bits
        self._journals = Journals(journals)
        self._live: dict[str, LivePin] = {}

    def in_force(self) -> list[LivePin]:
        """Returns the acknowledged pins that are neither being released nor ended."""
        for _, fact in self._journals.new():
            if fact["fact"] == "pinned":
                self._live[fact["id"]] = LivePin(fact["id"], fact["number"], fact["chunks"], fact["until_s"])
            elif fact["fact"] == "unpinning":
                self._live.pop(fact["id"], None)
        now_s = time.monotonic()
        self._live = {name: pin for name, pin in self._live.items() if pin.until_s > now_s}
        return list(self._live.values())

    def broken(self, pin: LivePin) -> Broken | None:
        """Returns the first chunk that breaks the promise. Raises OSError if the root does not answer."""
        for index in range(pin.chunks_count):
            found = self._look(pin, index)
            # The end of a promise is written before it ends: a promise in force now was in force when we looked.
            if found is not None and (found.is_wrong or pin in self.in_force()):
                return found
        return None

    def _look(self, pin: LivePin, index: int) -> Broken | None:
        address = chain_of(pin.number).addresses[index]
        name = places.chunk(address, SPACE.id, self._shard_bits)
        try:
            content = self._content(self._root / name)
        except FileNotFoundError:
            return Broken(pin, index, name, "missing", is_wrong=False)
        if content[-LAYOUT.chunk_bytes :] != chunk_bytes(pin.number, index):
            return Broken(pin, index, name, f"wrong, {len(content)} bytes", is_wrong=True)
        return None

    @staticmethod
    def _content(path: Path) -> bytes:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            with os.scandir(path.parent):
                return path.read_bytes()  # an NFS client may remember that it was absent, until the folder is opened
