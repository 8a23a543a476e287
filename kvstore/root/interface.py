"""What the store needs of a shared root: a few operations on names, the same for a mount, an object store and memory.

The truth about which chunks exist is here.  Every implementation passes one conformance suite; retries, limits and
faults are wrappers, never cases inside.

Errors: a missing file is a value (None or False).  ENOENT, ESTALE and ENOTCONN count as missing, because on a
distributed file system that is how a file that another host deleted looks.  Anything else is raised as one of
``kvstore.errors``: Overloaded (no space, over quota), PermissionDenied (read-only, not allowed) or Unavailable (I/O
error).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from kvstore.buffers import Borrowed, Pieces
from kvstore.format.places import Name


@dataclass(frozen=True, slots=True)
class Traits:
    """What a root can do; where it cannot, the store has a slower or weaker way and says so."""

    exclusive_publish: bool
    """Of several writers of one name exactly one wins. Without it the last one wins, with equal content or a miss."""
    ordered_publish: bool
    """Publishing is cheap next to staging, so chunks are published strictly parents first."""
    touch: bool
    """The mtime of a file can be set."""
    mapped: bool
    """Files can be mapped into memory."""
    fenced: bool
    """Once a folder is removed nothing can be moved into it any more: what sweeps are fenced by (rule F1)."""
    conditional_remove: bool
    """A file can be removed on the condition that it is still the one that was looked at (rule O1): ``remove_if``."""


@dataclass(frozen=True, slots=True)
class Stat:
    """What the root knows of a file without opening it."""

    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Seen:
    """A file as one look found it, all of one version of it: only ``look`` makes one, and ``remove_if`` takes it."""

    stat: Stat
    prefix: bytes
    """Its first bytes, as many as were asked for; fewer where the file is shorter."""
    tag: str | None
    """What the store calls this version (an ETag). None where versions have no names; on an object store without them
    a file that is replaced meanwhile may show the stat of one version and the prefix of another."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a folder; ``name`` is its last part. ``stat`` is None for a folder."""

    name: str
    stat: Stat | None


@dataclass(frozen=True, slots=True)
class Space:
    """Room on what holds the root; None where nobody can tell (object stores)."""

    total_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """How native code opens the files of a root by itself, in the way that this root would."""

    path: str
    """The root's folder, absolute."""
    never_blocks: bool
    """Reading never waits for a device: the files are in memory."""
    stages: bool
    """Files may be written there too."""
    direct: bool
    """What is not cached shall be read around the page cache."""


def local_files(root: Root) -> LocalFiles | None:
    """None where each file has to be asked of the root: wrappers, object stores, memory."""
    found = getattr(root, "local_files", None)
    return found if isinstance(found, LocalFiles) else None


class Reader(Protocol):
    """An open file; used by one thread at a time. Close it, or use it as a context."""

    stat: Stat

    def read(self, pieces: Pieces, offset: int, borrowed: Borrowed) -> int:
        """Fills ``pieces`` from ``offset`` on; returns the bytes read, fewer at the end of the file or if it vanished.

        Writes into ``pieces`` only inside ``borrowed.writing()``, and never in a step that may block on the device.
        """
        ...

    def map(self) -> memoryview | None:
        """The whole file as read-only memory that stays valid after close; None where it vanished."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...

    def __enter__(self) -> Reader: ...

    def __exit__(self, *_: object) -> None: ...


class Root(Protocol):
    """A shared root. Methods may block on the device for ever: only ``Lanes`` calls them, with a deadline."""

    url: str
    traits: Traits

    def stage(self, name: Name, pieces: Pieces, *, stamp_ns: int, durable: bool) -> None:
        """Writes a new file that nobody else sees yet, with mtime ``stamp_ns``; ``durable`` syncs it.

        Makes the folder. The name must not have been used before (rule W2). On an error nothing of it is left behind
        that ``discard`` would not remove.
        """
        ...

    def publish(self, staged: Name, name: Name, *, durable: bool) -> bool:
        """Gives a staged file its final name if nobody has it: first writer wins (rule W1). Never replaces.

        True if this one won, False if the name was taken. The staged name is gone afterwards.
        """
        ...

    def discard(self, staged: Name) -> None:
        """Removes a staged file, as far as it exists."""
        ...

    def open(self, name: Name) -> Reader | None:
        """Opens a file for reading; None where there is none."""
        ...

    def stat(self, name: Name) -> Stat | None:
        """Size and mtime; None where there is none."""
        ...

    def look(self, name: Name, size_bytes: int) -> Seen | None:
        """Size, mtime and first ``size_bytes`` of a file, of one moment; None where there is none."""
        ...

    def touch(self, name: Name, stamp_ns: int) -> bool:
        """Sets the mtime; False where the file is gone or the root cannot."""
        ...

    def move(self, source: Name, name: Name, *, make_folder: bool = True) -> bool:
        """Renames a file to a name that nobody else uses; False where the source is gone.

        Makes the folder of ``name``, unless told not to: then False where the folder does not exist either (rule F1).
        """
        ...

    def replace(self, staged: Name, name: Name, seen: Seen, aside: Name, *, durable: bool) -> bool:
        """Gives a staged file a name that another has, if that is still the one that ``look`` found; False where it is
        not, and then nothing was done. For rule W5 alone; the staged name is gone afterwards.

        At every moment one of the two has the name. The one that was replaced has the name ``aside``, which nobody else
        uses, in the folder of the staged file, until it is removed: it may be open or mapped elsewhere. Raises
        InvalidRequest where the root cannot.
        """
        ...

    def make_folder(self, name: Name) -> None:
        """Makes a folder, and those above it; no error where it exists."""
        ...

    def remove(self, name: Name) -> bool:
        """Deletes a file; False where there was none."""
        ...

    def remove_if(self, name: Name, seen: Seen) -> bool:
        """Deletes a file if it is still the one that ``look`` found there; False where another has its name by now.

        True says that ``seen`` is gone, whoever deleted it: object stores do not tell. Raises InvalidRequest where the
        root cannot (``conditional_remove``).
        """
        ...

    def remove_folder(self, name: Name, *, durable: bool = False) -> bool:
        """Deletes an empty folder; False where it is not empty. A folder that does not exist counts as deleted.

        ``durable`` syncs the folder above it, so that it does not rise again when a server crashes.
        """
        ...

    def list(self, folder: Name) -> Iterator[Entry]:
        """The entries of a folder in no order, streamed; nothing where there is no such folder."""
        ...

    def space(self) -> Space:
        """Total and free room."""
        ...

    def close(self) -> None:
        """Releases connections; idempotent."""
        ...
