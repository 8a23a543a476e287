"""A root in this process's memory: for tests, for trying the store out, and for engines that share one process.

A real implementation, not a stand-in: it passes the conformance suite of every root.  Several roots over one
``MemoryFiles`` are several hosts with one mount.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.buffers import Borrowed, Pieces, byte_length
from kvstore.errors import Overloaded, Unavailable
from kvstore.format.places import Name
from kvstore.root.interface import Entry, Space, Stat, Traits


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """One file's bytes, which never change, and its mtime."""

    content: bytes
    mtime_ns: int

    @property
    def stat(self) -> Stat:
        """Size and mtime."""
        return Stat(len(self.content), self.mtime_ns)


class MemoryFiles:
    """The files and folders that several MemoryRoots share. ``capacity_bytes`` is where it is full; None for never."""

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.lock = threading.Lock()
        self.used_bytes = 0
        self._folders: dict[str, dict[str, MemoryFile | None]] = {"": {}}

    # Everything below is called with the lock held.

    def find(self, name: str) -> MemoryFile | None:
        """The file of that name; None where there is none, or a folder."""
        folder, last = _split(name)
        return self._folders.get(folder, {}).get(last)

    def write(self, name: str, file: MemoryFile) -> None:
        """Sets a file, making its folders. Raises Unavailable where a folder has that name, or a file a folder's."""
        folder, last = _split(name)
        if name in self._folders:
            raise Unavailable(f"could not write {name}: it is a folder")
        self._make_folder(folder)
        self.used_bytes += len(file.content) - self._size(folder, last)
        self._folders[folder][last] = file

    def delete(self, name: str) -> MemoryFile | None:
        """Takes a file away and returns it; None where there was none."""
        folder, last = _split(name)
        file = self.find(name)
        if file is not None:
            self.used_bytes -= len(file.content)
            del self._folders[folder][last]
        return file

    def delete_folder(self, name: str) -> bool:
        """False where the folder is not empty, or is a file."""
        if name not in self._folders:
            return self.find(name) is None
        if self._folders[name] or not name:
            return False
        folder, last = _split(name)
        del self._folders[name], self._folders[folder][last]
        return True

    def entries(self, folder: str) -> list[Entry]:
        """A folder's entries at this moment."""
        return [
            Entry(name, None if file is None else file.stat) for name, file in self._folders.get(folder, {}).items()
        ]

    def _make_folder(self, name: str) -> None:
        if name in self._folders:
            return
        parent, last = _split(name)
        self._make_folder(parent)
        if self._folders[parent].get(last) is not None:
            raise Unavailable(f"could not make the folder {name}: it is a file")
        self._folders[parent][last] = None
        self._folders[name] = {}

    def _size(self, folder: str, last: str) -> int:
        file = self._folders[folder].get(last)
        return 0 if file is None else len(file.content)


class MemoryRoot:
    """A root over ``files``; fresh ones where none are given. ``name`` is only for the URL."""

    def __init__(self, files: MemoryFiles | None = None, *, name: str = "") -> None:
        self.files = files or MemoryFiles()
        self.url = f"memory://{name}"
        self.traits = Traits(exclusive_publish=True, ordered_publish=True, touch=True, mapped=True)

    def stage(self, name: Name, pieces: Pieces, *, stamp_ns: int, durable: bool) -> None:
        content = b"".join(pieces)
        with self.files.lock:
            if self.files.find(name) is not None:
                raise Unavailable(f"could not write {name}: the staging name was used before")
            room = self.files.capacity_bytes
            if room is not None and self.files.used_bytes + len(content) > room:
                raise Overloaded(f"could not write {name}: {len(content)} bytes do not fit, the root holds {room}")
            self.files.write(name, MemoryFile(content, stamp_ns))

    def publish(self, staged: Name, name: Name, *, durable: bool) -> bool:
        with self.files.lock:
            file = self.files.find(staged)
            if file is None:
                raise Unavailable(f"could not publish {name}: the staged file {staged} is gone")
            won = self.files.find(name) is None
            if won:
                self.files.write(name, file)
            self.files.delete(staged)
        return won

    def discard(self, staged: Name) -> None:
        self.remove(staged)

    def open(self, name: Name) -> MemoryReader | None:
        with self.files.lock:
            file = self.files.find(name)
        return None if file is None else MemoryReader(file)

    def stat(self, name: Name) -> Stat | None:
        with self.files.lock:
            file = self.files.find(name)
        return None if file is None else file.stat

    def touch(self, name: Name, stamp_ns: int) -> bool:
        with self.files.lock:
            file = self.files.find(name)
            if file is None:
                return False
            self.files.write(name, MemoryFile(file.content, stamp_ns))
        return True

    def move(self, source: Name, name: Name) -> bool:
        with self.files.lock:
            file = self.files.find(source)
            if file is None:
                return False
            self.files.write(name, file)
            self.files.delete(source)
        return True

    def remove(self, name: Name) -> bool:
        with self.files.lock:
            return self.files.delete(name) is not None

    def remove_folder(self, name: Name) -> bool:
        with self.files.lock:
            return self.files.delete_folder(name)

    def list(self, folder: Name) -> Iterator[Entry]:
        with self.files.lock:
            entries = self.files.entries(folder)
        return iter(entries)

    def space(self) -> Space:
        total = self.files.capacity_bytes
        return Space(total, None if total is None else max(0, total - self.files.used_bytes))

    def close(self) -> None:
        """Nothing to release: the files belong to whoever made them."""


class MemoryReader:
    """An open file of a MemoryRoot; reads on after the file was deleted, as on a local disk."""

    __slots__ = ("_content", "stat")

    def __init__(self, file: MemoryFile) -> None:
        self._content = memoryview(file.content)
        self.stat = file.stat

    def read(self, pieces: Pieces, offset: int, borrowed: Borrowed) -> int:
        done = max(0, min(byte_length(pieces), len(self._content) - offset))
        end = offset + done
        with borrowed.writing():
            for piece in pieces:
                size = max(0, min(len(piece), end - offset))
                piece[:size] = self._content[offset : offset + size]
                offset += size
        return done

    def map(self) -> memoryview | None:
        return self._content

    def close(self) -> None:
        """Nothing is held open."""

    def __enter__(self) -> MemoryReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _split(name: str) -> tuple[str, str]:
    """A name's folder and last part."""
    folder, _, last = name.rpartition("/")
    return folder, last
