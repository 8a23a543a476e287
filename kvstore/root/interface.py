"""The operations that the store needs of a shared root, the same for a mount, an object store and memory.

The root is the truth about which chunks exist. Every implementation passes one conformance suite; retries, limits and
faults are wrappers, never cases inside.

Errors: a missing file is a value (None or False). ENOENT, ESTALE and ENOTCONN count as missing, because a file that
another host deleted looks like that on a distributed file system. Anything else is raised as one of ``kvstore.errors``:
Overloaded (no space, over quota), PermissionDenied (read-only, not allowed) or Unavailable (I/O error).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from kvstore.core.buffers import BufferLoan, Pieces, ReadBuffer
from kvstore.errors import InvalidRequest
from kvstore.format.places import Name


@dataclass(frozen=True, slots=True)
class Traits:
    """The abilities of a root; without one, the store uses a slower or weaker way and says so."""

    exclusive_publish: bool
    """If several writers publish one name, exactly one wins. Without it the last wins: equal content or a miss."""
    ordered_publish: bool
    """Publishing is cheap next to staging, so chunks are published strictly parents first."""
    touch: bool
    """The root can set the mtime of a file."""
    mapped: bool
    """The root can map files into memory."""
    fenced: bool
    """Once a folder is removed, nothing can be moved into it any more: sweeps rely on that as a fence (rule F1)."""
    conditional_remove: bool
    """A file can be removed only if it is still the one that was looked at (rule O1): ``remove_if``."""


@dataclass(frozen=True, slots=True)
class Stat:
    """The root's facts about a file without opening it."""

    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Seen:
    """A file as one look found it, all of one version: only ``look`` makes one, and ``remove_if`` takes it."""

    stat: Stat
    prefix: bytes
    """Its first bytes, as many as were asked for; fewer if the file is shorter."""
    tag: str | None
    """The store's name for this version (an ETag); None if versions have no names. On an object store without them, a
    file that is replaced during the look may show the stat of one version and the prefix of another.
    """


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """One entry of a folder; ``name`` is its last part. ``stat`` is None for a folder."""

    name: str
    stat: Stat | None


@dataclass(frozen=True, slots=True)
class StorageSpace:
    """Total and free bytes of the storage that holds the root; None if unknown (object stores)."""

    total_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """Everything native code needs to open the files of a root by itself, in the way that this root would."""

    path: str
    """Absolute path of the root's folder."""
    never_blocks: bool
    """True if reads never wait for a device: the files are in memory."""
    stages: bool
    """True if native code may write files there too."""
    direct: bool
    """True if uncached data should be read around the page cache."""
    knows_absence: bool = True
    """False on NFS, whose client may go on taking a file for absent after another host stored it."""


def local_files(root: Root) -> LocalFiles | None:
    """Returns how native code opens a root's files; None if the root must open each (wrappers, objects, memory)."""
    found = getattr(root, "local_files", None)
    return found if isinstance(found, LocalFiles) else None


def fill(pieces: Pieces, content: ReadBuffer) -> None:
    """Copies ``content`` to the beginning of ``pieces``, which are at least as long."""
    start = 0
    for piece in pieces:
        size = min(len(piece), len(content) - start)
        if size:
            # numpy releases the GIL for a large copy; slice assignment would not.
            np.copyto(np.frombuffer(piece, np.uint8, size), np.frombuffer(content, np.uint8, size, start))
            start += size


class FileReader(Protocol):
    """An open file; used by one thread at a time. Close it, or use it as a context."""

    __slots__ = ()

    stat: Stat

    def read(self, pieces: Pieces, offset: int, borrowed: BufferLoan) -> int:
        """Fills ``pieces`` from ``offset`` on; returns the bytes read, fewer at the end of the file or if it vanished.

        Writes into ``pieces`` only inside ``borrowed.writing()``, and never in a step that may block on the device.
        """
        ...

    def close(self) -> None:
        """Closes the file. Idempotent."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Root(Protocol):
    """A shared root. Methods may block on the device for ever: only ``Executor`` calls them, with a deadline."""

    url: str
    traits: Traits

    def stage(self, name: Name, pieces: Pieces, *, stamp_ns: int, durable: bool) -> None:
        """Writes a new file that no other process uses yet, with mtime ``stamp_ns``; ``durable`` syncs it.

        Makes the folder. The name must not have been used before (rule W2). After an error ``discard`` removes whatever
        is left of it.
        """
        ...

    def publish(self, staged: Name, name: Name, *, durable: bool) -> bool:
        """Gives a staged file its final name if the name is free: first writer wins (rule W1). Never replaces.

        True if this writer won, False if the name was taken. The staged name is gone afterwards.
        """
        ...

    def discard(self, staged: Name) -> None:
        """Removes a staged file, if it exists."""
        self.remove(staged)

    def open(self, name: Name) -> FileReader | None:
        """Opens a file for reading; None if there is none."""
        ...

    def stat(self, name: Name) -> Stat | None:
        """Returns size and mtime; None if there is none."""
        ...

    def look(self, name: Name, size_bytes: int) -> Seen | None:
        """Returns size, mtime and first ``size_bytes`` of a file, all of one moment; None if there is none."""
        ...

    def touch(self, name: Name, stamp_ns: int) -> bool:
        """Sets the mtime; False if the file is gone or the root cannot."""
        ...

    def move(self, source: Name, name: Name, *, make_folder: bool = True) -> bool:
        """Renames a file to an unused name; False if the source is gone.

        ``make_folder`` also makes the folder of ``name``; without it, returns False if the folder is missing (rule F1).
        """
        ...

    def make_folder(self, name: Name) -> None:
        """Makes a folder, and those above it; no error if it exists."""
        ...

    def remove(self, name: Name) -> bool:
        """Deletes a file; False if there was none."""
        ...

    def remove_if(self, name: Name, seen: Seen) -> bool:
        """Deletes a file if it is still the one that ``look`` found there; False if another file has its name by now.

        True means that ``seen`` is gone, perhaps deleted by another client: object stores do not report which. Raises
        InvalidRequest if the root cannot (``conditional_remove``).
        """
        raise InvalidRequest(f"{self.url} cannot remove files conditionally (kvstore check-root says why)")

    def remove_folder(self, name: Name, *, durable: bool = False) -> bool:
        """Deletes an empty folder; False if it is not empty. A folder that does not exist counts as deleted.

        ``durable`` syncs the folder above it, so that it does not come back after a server crash.
        """
        ...

    def list(self, folder: Name) -> Iterator[FolderEntry]:
        """Yields the entries of a folder in no order, streamed; none if there is no such folder."""
        ...

    def sync(self) -> None:
        """Makes all that was published before durable; raises Unavailable if something of it was lost."""
        ...

    def space(self) -> StorageSpace:
        """Returns total and free room."""
        ...

    def close(self) -> None:
        """Releases connections. Idempotent."""
        ...
