"""Takes in what a local disk tier finds in its folder at the start: lists all files, then takes in the most useful
first.

Separate from the tier, because it runs beside it on a thread of its own. Nobody knows how many bytes there are until
all files are listed, so nothing may be written before. After that, files that are not yet taken in count as held.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable

import numpy as np

from kvstore.address import ADDRESS_BYTES, Address
from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.format.header import Damaged, Header
from kvstore.format.places import Name
from kvstore.namespace import NamespaceId
from kvstore.node.disk_folder import SHARD_BITS
from kvstore.node.disk_shelf import DiskShelf, Found
from kvstore.node.encoded import Encodings, NotDecodable
from kvstore.root.inspect import Inspector, Whole
from kvstore.root.interface import Root

RETRY_S = 5.0
"""Wait after an error of the disk."""

_RECORD = struct.Struct(f"<qq{ADDRESS_BYTES}s{places.NAMESPACE_ID_BYTES}s")
_MTIMES = np.dtype({"names": ["mtime_ns"], "formats": ["<i8"], "offsets": [0], "itemsize": _RECORD.size})


class Refill:
    """One thread that runs from ``start`` until all files are taken in, or until ``stop``.

    It calls ``failed`` for each error of the disk, and ``ended`` when it is done with the folder.
    """

    def __init__(
        self,
        root: Root,
        shelf: DiskShelf,
        encodings: Encodings,
        failed: Callable[[KVStoreError], None],
        ended: Callable[[], None],
    ) -> None:
        self._encodings = encodings
        self._root = root
        self._shelf = shelf
        self._failed = failed
        self._ended = ended
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kvstore-disk-refill", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Begins nothing more."""
        self._stopped.set()

    def _serve(self) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    records = self._listed()
                    kept, charged = self._within_bound(records)
                except KVStoreError as error:
                    self._failed(error)
                    self._stopped.wait(RETRY_S)
                else:
                    self._take_in(records, kept, charged)
                    return
        finally:
            self._ended()

    def _listed(self) -> bytearray:
        """Returns records of all files with names of chunks. Removes files with other names, and cut-off writes."""
        for session in self._entries(places.STAGING):
            folder = Name(f"{places.STAGING}/{session}")
            for part in self._entries(folder):
                self._root.remove(Name(f"{folder}/{part}"))
            self._root.remove_folder(folder)
        records = bytearray()
        for shard in self._entries(places.CHUNKS):
            folder = Name(f"{places.CHUNKS}/{shard}")
            for entry in self._root.list(folder):
                if self._stopped.is_set():
                    return records
                chunk = places.parse_chunk(entry.name)
                name = Name(f"{folder}/{entry.name}")
                if chunk is not None and entry.stat is not None and places.chunk(*chunk, SHARD_BITS) == name:
                    records += _RECORD.pack(entry.stat.mtime_ns, entry.stat.size_bytes, *chunk)
                elif entry.stat is not None:
                    self._root.remove(name)
        return records

    def _entries(self, folder: Name) -> list[str]:
        """Returns the names in a folder; none once the thread is told to stop."""
        return [] if self._stopped.is_set() else [entry.name for entry in self._root.list(folder)]

    def _within_bound(self, records: bytearray) -> tuple[list[int], int]:
        """Returns which files stay, most recently used first, and their bytes. Removes those over the bound."""
        # Most recently used first is also parents first (kvstore/recency.py).
        order: list[int] = np.argsort(-np.frombuffer(records, _MTIMES)["mtime_ns"], kind="stable").tolist()
        kept: list[int] = []
        total = 0
        for place in order:
            found = _found(records, place)
            charged = self._shelf.charge(found.size_bytes)
            if total + charged <= self._shelf.bytes_max:
                total += charged
                kept.append(place)
            elif not self._stopped.is_set():
                self._root.remove(found.name)
        return kept, total

    def _take_in(self, records: bytearray, kept: list[int], charged: int) -> None:
        if self._stopped.is_set():
            return  # not all files were listed
        self._shelf.counted(charged)
        inspector = Inspector(self._root, verify_payload=False)
        for place in kept:
            if self._stopped.is_set():
                return
            try:
                self._take(inspector, _found(records, place))
            except KVStoreError as error:
                # The file may still be there, so it stays counted.
                self._failed(error)
                self._stopped.wait(RETRY_S)
        self._shelf.whole()

    def _take(self, inspector: Inspector, found: Found) -> None:
        verdict = inspector.look(found.name)
        if isinstance(verdict, Whole) and _is_of(verdict.header, found):
            header = self._opened(found, verdict.header)
            if header is not None and self._shelf.admit(found, header):
                return
        self._root.remove(found.name)
        self._shelf.gone(found)

    def _opened(self, found: Found, header: Header) -> Header | None:
        """Returns a header whose tokens can be read; None if it is encrypted and its key is no longer known."""
        reader = self._root.open(found.name) if header.encoding else None
        if reader is None:
            return None if header.encoding else header
        with reader:
            try:
                opened = self._encodings.header_of(reader)
            except (NotDecodable, Damaged):
                return None
        return opened and opened[0]


def _found(records: bytearray, place: int) -> Found:
    mtime_ns, size_bytes, address, namespace = _RECORD.unpack_from(records, place * _RECORD.size)
    return Found(mtime_ns, size_bytes, Address(address), NamespaceId(namespace))


def _is_of(header: Header, found: Found) -> bool:
    return header.address == found.address and header.namespace[: places.NAMESPACE_ID_BYTES] == found.namespace
