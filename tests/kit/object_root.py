"""A root in memory that acts as an object store with conditional writes and deletes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from kvstore.core.buffers import BufferLoan, Pieces, byte_length
from kvstore.format.places import Name
from kvstore.root.interface import Seen, Stat, Traits, fill
from kvstore.root.memory import MemoryFile, MemoryReader, MemoryRoot, split


class MemoryObjectRoot(MemoryRoot):
    """Folders are only parts of names, the mtime stays as staged, and nothing is mapped."""

    traits = Traits(
        exclusive_publish=True, ordered_publish=False, touch=False, mapped=False, fenced=False, conditional_remove=True
    )

    def open(self, name: Name) -> MemoryReader | None:
        file = self._find(name)
        return None if file is None else MemoryObjectReader(file.stat, file, lambda: self._find(name))

    def look(self, name: Name, size_bytes: int) -> Seen | None:
        file = self._find(name)
        return None if file is None else Seen(file.stat, file.content[:size_bytes], _tag(file))

    def touch(self, name: Name, stamp_ns: int) -> bool:
        return False

    def move(self, source: Name, name: Name, *, make_folder: bool = True) -> bool:
        return super().move(source, name, make_folder=True)

    def remove_if(self, name: Name, seen: Seen) -> bool:
        with self.files.lock:
            file = self.files.find(name)
            if file is not None and _tag(file) != seen.tag:
                return False
            self._delete(name)
        return True

    def make_folder(self, name: Name) -> None:
        """Does nothing."""

    def _delete(self, name: str) -> bool:
        """Deletes a file with the lock held, and the folders that are empty without it."""
        found = super()._delete(name)
        while name and found:
            name = split(name)[0]
            if not self.files.delete_folder(name):
                break
        return found


class MemoryObjectReader(MemoryReader):
    """An open object: each read returns the bytes that the name has at that moment."""

    def __init__(self, stat: Stat, file: MemoryFile, find: Callable[[], MemoryFile | None]) -> None:
        super().__init__(stat, file)
        self._find = find

    def read(self, pieces: Pieces, offset: int, borrowed: BufferLoan) -> int:
        file, end = self._find(), offset + byte_length(pieces)
        content = b"" if file is None else memoryview(file.content)[: self.stat.size_bytes][offset:end]
        with borrowed.writing():
            fill(pieces, content)
        return len(content)


def _tag(file: MemoryFile) -> str:
    """Its ETag: a digest of the bytes, as on S3."""
    return hashlib.blake2b(file.content, digest_size=16).hexdigest()
