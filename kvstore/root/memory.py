"""A root in this process's memory: for tests, for trials, and for engines that share one process.

A real implementation: it passes the conformance suite of every root. Several roots over one ``MemoryFiles`` act as
several hosts with one mount, or with one bucket of an object store.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.core.buffers import BufferLoan, Pieces, byte_length
from kvstore.errors import StoreFull, Unavailable
from kvstore.format.places import Name
from kvstore.root.interface import FileReader, FolderEntry, Root, Seen, Stat, StorageSpace, Traits, fill


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """One file's bytes, which never change, and its mtime."""

    content: bytes
    mtime_ns: int

    @property
    def stat(self) -> Stat:
        return Stat(len(self.content), self.mtime_ns)


class MemoryFiles:
    """The files and folders that several MemoryRoots share; at most ``capacity_bytes``, or any number if None."""

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.lock = threading.Lock()  # guards files and folders
        self.used_bytes = 0
        self._folders: dict[str, dict[str, MemoryFile | None]] = {"": {}}

    # Call everything below with the lock held.

    def find(self, name: str) -> MemoryFile | None:
        folder, last = split(name)
        return self._folders.get(folder, {}).get(last)

    def write(self, name: str, file: MemoryFile) -> None:
        """Sets a file, making its folders. Raises Unavailable if a folder has its name, or a file one of theirs."""
        folder, last = split(name)
        if name in self._folders:
            raise Unavailable(f"could not write {name}: it is a folder")
        self.make_folder(folder)
        before = self.find(name)
        self.used_bytes += len(file.content) - (0 if before is None else len(before.content))
        self._folders[folder][last] = file

    def delete(self, name: str) -> MemoryFile | None:
        """Takes a file away and returns it; None if there was none."""
        folder, last = split(name)
        file = self.find(name)
        if file is not None:
            self.used_bytes -= len(file.content)
            del self._folders[folder][last]
        return file

    def delete_folder(self, name: str) -> bool:
        """Deletes a folder; False if it is not empty, or is a file."""
        if name not in self._folders:
            return self.find(name) is None
        if self._folders[name] or not name:
            return False
        folder, last = split(name)
        del self._folders[name], self._folders[folder][last]
        return True

    def entries(self, folder: str) -> list[FolderEntry]:
        return [
            FolderEntry(name, None if file is None else file.stat)
            for name, file in self._folders.get(folder, {}).items()
        ]

    def has_folder(self, name: str) -> bool:
        return name in self._folders

    def make_folder(self, name: str) -> None:
        """Makes a folder and those above it. Raises Unavailable if one of them is a file."""
        if name in self._folders:
            return
        parent, last = split(name)
        self.make_folder(parent)
        if self._folders[parent].get(last) is not None:
            raise Unavailable(f"could not make the folder {name}: it is a file")
        self._folders[parent][last] = None
        self._folders[name] = {}


class MemoryRoot(Root):
    """A root over ``files``; over fresh ones if none are given. ``name`` is only for the URL."""

    traits = Traits(
        exclusive_publish=True,
        ordered_publish=True,
        touch=True,
        mapped=True,
        fenced=True,
        conditional_remove=False,
    )

    def __init__(self, files: MemoryFiles | None = None, *, name: str = "") -> None:
        self.files = files or MemoryFiles()
        self.url = f"memory://{name}"

    def stage(self, name: Name, pieces: Pieces, *, stamp_ns: int, durable: bool) -> None:
        content = b"".join(pieces)
        with self.files.lock:
            if self.files.find(name) is not None:
                raise Unavailable(f"could not write {name}: the staging name was used before")
            room = self.files.capacity_bytes
            if room is not None and self.files.used_bytes + len(content) > room:
                raise StoreFull(f"could not write {name}: {len(content)} bytes do not fit, the root holds {room}")
            self.files.write(name, MemoryFile(content, stamp_ns))

    def publish(self, staged: Name, name: Name, *, durable: bool) -> bool:
        with self.files.lock:
            file = self.files.find(staged)
            if file is None:
                raise Unavailable(f"could not publish {name}: the staged file {staged} is gone")
            won = self.files.find(name) is None
            if won:
                self.files.write(name, file)
            self._delete(staged)
        return won

    def open(self, name: Name) -> MemoryReader | None:
        file = self._find(name)
        return None if file is None else MemoryReader(file.stat, file)

    def stat(self, name: Name) -> Stat | None:
        file = self._find(name)
        return None if file is None else file.stat

    def look(self, name: Name, size_bytes: int) -> Seen | None:
        file = self._find(name)
        return None if file is None else Seen(file.stat, file.content[:size_bytes], None)

    def touch(self, name: Name, stamp_ns: int) -> bool:
        with self.files.lock:
            file = self.files.find(name)
            if file is None:
                return False
            self.files.write(name, MemoryFile(file.content, stamp_ns))
        return True

    def move(self, source: Name, name: Name, *, make_folder: bool = True) -> bool:
        with self.files.lock:
            file = self.files.find(source)
            if file is None or not (make_folder or self.files.has_folder(split(name)[0])):
                return False
            self.files.write(name, file)
            self._delete(source)
        return True

    def remove(self, name: Name) -> bool:
        with self.files.lock:
            return self._delete(name)

    def make_folder(self, name: Name) -> None:
        with self.files.lock:
            self.files.make_folder(name)

    def remove_folder(self, name: Name, *, durable: bool = False) -> bool:
        with self.files.lock:
            return self.files.delete_folder(name)

    def list(self, folder: Name) -> Iterator[FolderEntry]:
        with self.files.lock:
            entries = self.files.entries(folder)
        return iter(entries)

    def sync(self) -> None:
        """Does nothing: memory survives no crash."""

    def space(self) -> StorageSpace:
        total = self.files.capacity_bytes
        return StorageSpace(total, None if total is None else max(0, total - self.files.used_bytes))

    def close(self) -> None:
        """Releases nothing: the files belong to the caller that made them."""

    def _find(self, name: Name) -> MemoryFile | None:
        with self.files.lock:
            return self.files.find(name)

    def _delete(self, name: str) -> bool:
        """Deletes a file with the lock held."""
        return self.files.delete(name) is not None


class MemoryReader(FileReader):
    """An open file of a MemoryRoot: always the same file, as on a local disk."""

    def __init__(self, stat: Stat, file: MemoryFile) -> None:
        self.stat = stat
        self._file = file

    def read(self, pieces: Pieces, offset: int, borrowed: BufferLoan) -> int:
        content = memoryview(self._file.content)[offset : offset + byte_length(pieces)]
        with borrowed.writing():
            fill(pieces, content)
        return len(content)

    def close(self) -> None:
        """Does nothing: no file is held open."""


def split(name: str) -> tuple[str, str]:
    """Returns a name's folder and last part."""
    folder, _, last = name.rpartition("/")
    return folder, last
