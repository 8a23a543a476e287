"""A root that is not mounted: an object store, or anything else that fsspec reaches by URL.

It differs from a mounted root in these ways:

* There is no link(2). Publishing is the PUT itself, conditional on the name being free if the server can do that
  (``exclusive_publish``). If it cannot, we look and then write: if two writers publish at the same moment the last
  wins, and a reader in between may get sections of both. It verifies each, so that is a miss, never wrong bytes.
* A staged file exists in this process only. A staged object would have to be copied by the server to be published,
  which doubles the writes and is not conditional everywhere. The bytes that wait are those of puts in flight, which the
  node limits; ``staged_bytes_max`` is the second line of defence.
* The mtime is the time of the PUT and cannot be set: eviction is by age of publication, first in, first out.
* No folder can fence a sweep. A collector deletes on the condition that the object is the one it looked at
  (``remove_if``), if the server can do that; if it cannot, there is no garbage collection (rule O1).
* Publishing costs as much as writing, so a prompt's chunks are published side by side (``ordered_publish`` is False).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvstore.buffers import Borrowed, Pieces, byte_length
from kvstore.errors import InvalidRequest, Overloaded, Unavailable
from kvstore.format.places import Name
from kvstore.root.conditions import try_conditions
from kvstore.root.interface import Entry, Seen, Space, Stat, Traits
from kvstore.root.remote import GONE, Remote, error_of, is_gone, translated
from kvstore.sources import Ids, RandomIds

STAGED_BYTES_MAX = 4 << 30
_CONDITIONAL = frozenset({"gs", "gcs", "az", "abfs", "abfss"})
"""Schemes whose servers decide whether a name is free."""
RANGE_BYTES_MAX = 32 << 20
"""The most that one GET asks for, so that a read of a large chunk does not hold all of it twice."""


@dataclass(frozen=True, slots=True)
class _Staged:
    """Bytes that wait to be published; None while they are being collected."""

    size_bytes: int
    content: bytes | None


class ObjectRoot:
    """A root at ``path`` of a Remote.

    ``exclusive_publish`` says whether the server decides who created a name, ``conditional_remove`` whether it can
    delete a file only if it is still a certain version.
    """

    def __init__(
        self,
        remote: Remote,
        path: str,
        url: str,
        *,
        exclusive_publish: bool,
        conditional_remove: bool = False,
        staged_bytes_max: int = STAGED_BYTES_MAX,
    ) -> None:
        self.url = url
        self.traits = Traits(
            exclusive_publish=exclusive_publish,
            ordered_publish=False,
            touch=False,
            mapped=False,
            fenced=False,
            conditional_remove=conditional_remove,
        )
        self._remote = remote
        self._base = path
        self._staged: dict[Name, _Staged] = {}
        self._staged_bytes = 0
        self._staged_bytes_max = staged_bytes_max
        self._lock = threading.Lock()  # guards staged bytes

    def stage(self, name: Name, pieces: Pieces, *, stamp_ns: int, durable: bool) -> None:
        size = byte_length(pieces)
        with self._lock:
            if name in self._staged:
                raise Unavailable(f"could not write {name}: the staging name was used before")
            if self._staged_bytes + size > self._staged_bytes_max:
                raise Overloaded(
                    f"could not stage {size} bytes: {self._staged_bytes} are on their way to {self.url}, "
                    f"over the limit of {self._staged_bytes_max}; put less at a time"
                )
            self._staged[name] = _Staged(size, None)
            self._staged_bytes += size
        content = b"".join(pieces)
        with self._lock:
            self._staged[name] = _Staged(size, content)

    def publish(self, staged: Name, name: Name, *, durable: bool) -> bool:
        with self._lock:
            waiting = self._staged.get(staged)
        if waiting is None or waiting.content is None:
            return self._put_back(staged, name)
        won = self._put(name, waiting.content)
        self.discard(staged)
        return won

    def discard(self, staged: Name) -> None:
        with self._lock:
            waiting = self._staged.pop(staged, None)
            if waiting is not None:
                self._staged_bytes -= waiting.size_bytes

    def open(self, name: Name) -> ObjectReader | None:
        stat = self.stat(name)
        return None if stat is None else ObjectReader(self._remote, self._at(name), stat)

    def stat(self, name: Name) -> Stat | None:
        with translated("look at", self._at(name)):
            return self._remote.stat(self._at(name))

    def look(self, name: Name, size_bytes: int) -> Seen | None:
        with translated("look at", self._at(name)):
            return self._remote.look(self._at(name), size_bytes)

    def touch(self, name: Name, stamp_ns: int) -> bool:
        return False

    def move(self, source: Name, name: Name, *, make_folder: bool = True) -> bool:
        """Copies, then deletes: a failure in between leaves both, which ``fsck`` finds.

        Deletes the version that it looked at before it copied, if the server can do that. So it never deletes a file
        published since, after another host had moved the same file.
        """
        with translated("move", self._at(source)):
            seen = self._remote.look(self._at(source), 1) if self.traits.conditional_remove else None
            try:
                self._remote.copy(self._at(source), self._at(name))
            except GONE:
                return False
            if seen is not None and seen.tag is not None:
                self._remote.delete_if(self._at(source), seen.tag)
                return True
            with suppress(*GONE):
                self._remote.delete(self._at(source))
        return True

    def remove(self, name: Name) -> bool:
        with translated("remove", self._at(name)):
            # S3 answers a deletion alike whether or not there was an object.
            if self._remote.stat(self._at(name)) is None:
                return False
            try:
                self._remote.delete(self._at(name))
            except GONE:
                return False
        return True

    def remove_if(self, name: Name, seen: Seen) -> bool:
        if not self.traits.conditional_remove or seen.tag is None:
            raise InvalidRequest(f"{self.url} cannot remove files conditionally (kvstore check-root says why)")
        with translated("remove", self._at(name)):
            return self._remote.delete_if(self._at(name), seen.tag)

    def make_folder(self, name: Name) -> None:
        """Does nothing: object stores have names only, and where folders are real, writing makes them."""

    def remove_folder(self, name: Name, *, durable: bool = False) -> bool:
        with translated("remove", self._at(name)):
            return self._remote.remove_folder(self._at(name))

    def list(self, folder: Name) -> Iterator[Entry]:
        with translated("list", self._at(folder)):
            for page in self._remote.pages(self._at(folder)):
                yield from page

    def sync(self) -> None:
        """Does nothing: what an object store acknowledged is durable."""

    def space(self) -> Space:
        return Space(None, None)

    def close(self) -> None:
        with self._lock:
            self._staged.clear()
            self._staged_bytes = 0
        with translated("close", self._base):
            self._remote.close()

    def _put_back(self, source: Name, name: Name) -> bool:
        """Publishes a file that is on the server already: one that was quarantined by mistake.

        Reads and writes it, because a copy on the server is not conditional everywhere.
        """
        with translated("publish", self._at(name)):
            stat = self._remote.stat(self._at(source))
            if stat is None:
                raise Unavailable(f"could not publish {name}: the staged file {source} is gone")
            content = self._remote.read(self._at(source), 0, stat.size_bytes) if stat.size_bytes else b""
            won = self._put(name, content)
            with suppress(*GONE):
                self._remote.delete(self._at(source))
        return won

    def _put(self, name: Name, content: bytes) -> bool:
        path = self._at(name)
        with translated("publish", path):
            if not self.traits.exclusive_publish and self._remote.stat(path) is not None:
                return False
            try:
                if self.traits.exclusive_publish:
                    self._remote.create(path, content)
                else:
                    self._remote.write(path, content)
            except FileExistsError:
                return False
            except OSError:
                # An error may also be a refusal: 409 or 500 while another host's PUT is under way (AWS, rclone), or the
                # lost answer to a PUT of ours. If folders are real (SFTP), it may be a torn file of ours, which has
                # another size.
                found = self._remote.stat(path)
                if found is not None and found.size_bytes == len(content):
                    return False
                raise
        return True

    def _at(self, name: Name) -> str:
        return f"{self._base}/{name}" if name else self._base


class ObjectReader:
    """A file of an ObjectRoot. Each read is a separate GET, which returns the bytes of that moment."""

    __slots__ = ("_path", "_remote", "stat")

    def __init__(self, remote: Remote, path: str, stat: Stat) -> None:
        self._remote = remote
        self._path = path
        self.stat = stat

    def read(self, pieces: Pieces, offset: int, borrowed: Borrowed) -> int:
        end = min(offset + byte_length(pieces), self.stat.size_bytes)
        start, target = offset, _Target(pieces)
        while start < end:
            borrowed.check()
            stop = min(end, start + RANGE_BYTES_MAX)
            with translated("read", self._path):
                try:
                    # Read into memory of its own: the network may take for ever, and the caller may leave meanwhile.
                    content = memoryview(self._remote.read(self._path, start, stop))[: stop - start]
                except OSError as cause:
                    if is_gone(cause):
                        break
                    raise
            with borrowed.writing():
                target.fill(content)
            start += len(content)
            if start < stop:
                break
        return max(0, start - offset)

    def map(self) -> memoryview | None:
        return None

    def close(self) -> None:
        """Does nothing: no file is held open between reads."""

    def __enter__(self) -> ObjectReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Target:
    """Pieces being filled in order."""

    __slots__ = ("_index", "_pieces", "_start")

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._index = 0
        self._start = 0

    def fill(self, content: memoryview) -> None:
        while len(content):
            piece = self._pieces[self._index]
            size = min(len(piece) - self._start, len(content))
            piece[self._start : self._start + size] = content[:size]
            content = content[size:]
            self._start += size
            if self._start == len(piece):
                self._index += 1
                self._start = 0


def open_object_root(url: str, options: Mapping[str, Any] | None = None, *, ids: Ids | None = None) -> ObjectRoot:
    """Connects to the store of ``url`` and tries whether its writes and deletes can be conditional.

    ``options`` are those of fsspec for that scheme (``endpoint_url``, ``key``, ...). Raises InvalidRequest for a scheme
    that no library serves, RootMismatch if the bucket does not exist, Unavailable, PermissionDenied.
    """
    remote, path = connect(url, options or {})
    if not path.strip("/"):
        raise InvalidRequest(f"root {url} names no bucket or folder: expected {url.rstrip('/')}/NAME")
    try:
        conditions = try_conditions(remote, path, ids or RandomIds())
    except BaseException:
        remote.close()
        raise
    return ObjectRoot(remote, path, url, exclusive_publish=conditions.create, conditional_remove=conditions.delete)


def connect(url: str, options: Mapping[str, Any]) -> tuple[Remote, str]:
    """Returns the file system of a URL, and the path in it. ``options`` go to fsspec unchanged.

    Raises InvalidRequest if no library serves the scheme, or if the options do not fit it.
    """
    # Imported here: most roots are mounted, and need neither fsspec nor the second that some of its libraries take to
    # import.
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    try:
        if scheme in ("s3", "s3a"):
            from kvstore.root.remote_s3 import S3Remote, s3_options

            fs, path = url_to_fs(url, **_private(s3_options(options)))
            remote: Remote = S3Remote(fs)
        else:
            fs, path = url_to_fs(url, **_private(options))
            remote = Remote(fs, conditional=scheme in _CONDITIONAL)
    except ImportError as cause:
        extra = "kvstore-llm[s3]" if scheme in ("s3", "s3a") else f"fsspec[{scheme}]"
        raise InvalidRequest(f"root {url}: {cause}; run `pip install {extra}`") from cause
    except (TypeError, ValueError) as cause:
        raise InvalidRequest(f"root {url}: {cause}; check its options") from cause
    except OSError as cause:
        raise error_of("open", url, cause) from cause
    return remote, path.rstrip("/")


def _private(options: Mapping[str, Any]) -> dict[str, Any]:
    return {**options, "use_listings_cache": False, "skip_instance_cache": True}
