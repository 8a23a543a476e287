"""A root in an object store, through fsspec."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvstore.core.buffers import BufferLoan, Pieces, byte_length, skip
from kvstore.core.clock import Ids, RandomIds
from kvstore.errors import (
    InvalidRequest,
    KVStoreError,
    Overloaded,
    PermissionDenied,
    RootMismatch,
    StoreFull,
    Unavailable,
)
from kvstore.format import places
from kvstore.format.places import Name
from kvstore.root.interface import FileReader, FolderEntry, Seen, Stat, StorageSpace, Traits, fill
from kvstore.root.posix import FULL_ERRORS, MISSING_ERRORS, REFUSED_ERRORS, SHORT_ERRORS

# The few calls that ObjectRoot makes of fsspec, and the translation of their errors.
#
# A cached listing would miss another host's new chunk, and would still show a deleted one.


GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""The errors for a file that is not there."""

_BUSY_ERRORS = SHORT_ERRORS | {errno.EBUSY}
_MTIME_KEYS = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


class Remote:
    """Any fsspec file system. Paths are its own, without protocol; sizes in bytes. Raises fsspec's errors."""

    def __init__(self, fs: Any, *, conditional: bool = False) -> None:
        self.fs = fs
        self.conditional = conditional
        """True if the server decides about ``create``. Elsewhere fsspec looks first and writes then."""

    def stat(self, path: str) -> Stat | None:
        """Returns the stat of one file; None if there is none, or only a folder."""
        try:
            found = self.fs.info(path)
        except OSError as cause:
            if is_gone(cause):
                return None
            raise
        return None if found.get("type") == "directory" else stat_of(found)

    def read(self, path: str, start: int, end: int) -> bytes:
        content: bytes = self.fs.cat_file(path, start=start, end=end)
        return content

    def look(self, path: str, size_bytes: int) -> Seen | None:
        """Returns stat and first bytes of a file; None if there is none. Two requests, so without a tag."""
        stat = self.stat(path)
        if stat is None:
            return None
        try:
            return Seen(stat, self.read(path, 0, size_bytes)[:size_bytes] if stat.size_bytes else b"", None)
        except OSError as cause:
            if is_gone(cause):
                return None
            raise

    def create(self, path: str, content: bytes) -> None:
        """Writes a file that must not exist; raises FileExistsError if the file system can tell that it does."""
        self._write(path, content, "create")

    def write(self, path: str, content: bytes) -> None:
        self._write(path, content, None)

    def copy(self, source: str, path: str) -> None:
        try:
            self.fs.cp_file(source, path)
        except FileNotFoundError:
            if self.stat(source) is None:
                raise
            self.make_folder(path)
            self.fs.cp_file(source, path)

    def delete(self, path: str) -> None:
        self.fs.rm_file(path)

    def delete_if(self, path: str, tag: str) -> bool:
        """Deletes the version ``tag`` of a file; False if it has another version by now. True if it is gone."""
        raise NotImplementedError("fsspec has no conditional delete")

    def pages(self, folder: str) -> Iterator[list[FolderEntry]]:
        """Yields the entries of a folder, as many at a time as the file system gives; none if there is no folder."""
        self.fs.invalidate_cache(folder)
        try:
            found = self.fs.ls(folder, detail=True, refresh=True)
        except GONE:
            return
        yield [entry_of(item) for item in found if item["name"].strip("/") != folder.strip("/")]

    def remove_folder(self, folder: str) -> bool:
        """Deletes an empty folder, if the file system has folders; False if it is not empty."""
        if any(self.pages(folder)):
            return False
        try:
            self.fs.rmdir(folder)
        except GONE:
            return True
        except (OSError, NotImplementedError):
            return not any(self.pages(folder))
        return True

    def make_folder(self, path: str) -> None:
        """Makes the folder of ``path``, for file systems that need one (SFTP, HDFS)."""
        self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def close(self) -> None:
        """Does nothing: the garbage collector closes whatever fsspec's file systems hold."""

    def _write(self, path: str, content: bytes, mode: str | None) -> None:
        options = {} if mode is None else {"mode": mode}
        try:
            self.fs.pipe_file(path, content, **options)
        except FileNotFoundError:
            self.make_folder(path)
            self.fs.pipe_file(path, content, **options)


def stat_of(found: Mapping[str, Any]) -> Stat:
    """Returns size and mtime from fsspec's description of a file; mtime 0 if it has none."""
    return Stat(int(found.get("size") or 0), _mtime_ns(found))


def entry_of(found: Mapping[str, Any]) -> FolderEntry:
    """Returns a folder's entry from fsspec's description."""
    name = str(found["name"]).rstrip("/").rpartition("/")[2]
    return FolderEntry(name, None if found.get("type") == "directory" else stat_of(found))


def _mtime_ns(found: Mapping[str, Any]) -> int:
    for key in _MTIME_KEYS:
        value = found.get(key)
        if isinstance(value, str):
            with suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            value = value.timestamp()
        if isinstance(value, int | float):
            return int(value * 1_000_000) * 1_000
    return 0


@contextmanager
def translated(action: str, path: str) -> Iterator[None]:
    """Translates at the rim: errors of a foreign library become errors that a caller can act on."""
    try:
        yield
    except KVStoreError:
        raise
    except Exception as cause:  # fsspec's implementations raise errors of a dozen libraries
        raise error_of(action, path, cause) from cause


def is_gone(cause: OSError) -> bool:
    """True if an error means that the file does not exist (any more)."""
    return isinstance(cause, GONE) or cause.errno in MISSING_ERRORS


def error_of(action: str, path: str, cause: Exception) -> KVStoreError:
    """Returns the caller's error for one of a foreign library; ``action`` is a verb, such as "read"."""
    said = f"could not {action} {path}: {type(cause).__name__}: {cause}"
    code = cause.errno if isinstance(cause, OSError) else None
    if code in FULL_ERRORS:
        return StoreFull(f"{said}; the store is full: free space (kvstore-gc)")
    if code in _BUSY_ERRORS:
        return Overloaded(f"{said}; the store is busy: back off")
    if isinstance(cause, PermissionError) or code in REFUSED_ERRORS or "Credential" in type(cause).__name__:
        return PermissionDenied(f"{said}; check the credentials and the policy of the root")
    if isinstance(cause, NotImplementedError):
        return InvalidRequest(f"{said}; this file system cannot hold a root")
    return Unavailable(f"{said}; check the address of the store and the network")


# A root that is not mounted: an object store, or anything else that fsspec reaches by URL.
#
# It differs from a mounted root in these ways:
#
# * There is no link(2). Publishing is the PUT itself, conditional on the name being free if the server can do that
#   (``exclusive_publish``). If it cannot, we look and then write: if two writers publish at the same moment the last
#   wins, and a reader in between may get sections of both. It verifies each, so that is a miss, never wrong bytes.
# * A staged file exists in this process only. A staged object would have to be copied by the server to be published,
#   which doubles the writes and is not conditional everywhere. The bytes that wait are those of puts in flight, which
#   the node limits.
# * The mtime is the time of the PUT and cannot be set: eviction is by age of publication, first in, first out.
# * No folder can fence a sweep. A collector deletes on the condition that the object is the one it looked at
#   (``remove_if``), if the server can do that; if it cannot, there is no garbage collection (rule O1).
# * Publishing costs as much as writing, so a prompt's chunks are published side by side (``ordered_publish`` is
#   False).
#
# The conditions that a server honours are tried on the store itself when it is opened, never assumed. A server that
# ignores a condition answers as if it had been met. So does a client library that does not know the condition and
# omits it. Only a refusal proves anything.
#
# Buckets of S3 get calls of their own: one request where fsspec makes two, listings page by page, and limits on
# waiting. They work on a file system of ``s3fs`` (``pip install 'kvstore-llm[s3]'``), which fsspec imports.


@dataclass(frozen=True, slots=True)
class Conditions:
    """The server's guarantees when several hosts act concurrently."""

    create: bool
    """True if it creates a file only if the name is free (rule W1)."""
    delete: bool
    """True if it deletes a file only if it is the version that was looked at (rule O1)."""


def try_conditions(remote: Remote, path: str, ids: Ids) -> Conditions:
    """Writes and deletes one small file under ``path``.

    Raises InvalidRequest if the options are wrong, RootMismatch if there is no such bucket, Unavailable.
    """
    if not remote.conditional:
        return Conditions(create=False, delete=False)
    # Use a staging name of a session that does not exist: if this process dies here, fsck deletes the file.
    key = f"{path}/{places.staged(ids.fresh(), 0)}"
    with translated("open", path):
        try:
            remote.stat(key)
        except (TypeError, ValueError) as cause:
            # Libraries that connect on first use find wrong options, or an endpoint that is not a URL, only now.
            raise InvalidRequest(f"root {path}: {cause}; check its options") from cause
        try:
            remote.create(key, b"1")
        except PermissionError:
            return Conditions(create=False, delete=False)  # read-only: publishing reports that itself
        except FileNotFoundError as cause:
            raise RootMismatch(f"root {path}: no such bucket; make it, or check the name") from cause
        except (TypeError, ValueError, NotImplementedError):
            return Conditions(create=False, delete=False)  # a library that lacks conditional writes
        try:
            return Conditions(_creates(remote, key), _deletes(remote, key))
        finally:
            with suppress(*GONE):
                remote.delete(key)


def _creates(remote: Remote, key: str) -> bool:
    """True if a second creation of ``key``, which holds b"1", is refused. ``rclone serve s3`` writes anyway."""
    try:
        remote.create(key, b"2")
    except OSError:
        return remote.read(key, 0, 1) == b"1"
    return False


def _deletes(remote: Remote, key: str) -> bool:
    """True if deleting a replaced version of ``key`` is refused, and the current version is deleted.

    AWS refuses. Ceph 16 and ``rclone serve s3`` delete anyway. So does every server with a botocore before
    1.35.67, through which s3fs omits the condition.
    """
    old = remote.look(key, 1)
    if old is None or old.tag is None:
        return False
    remote.write(key, b"3")
    new = remote.look(key, 1)
    if new is None or new.tag is None or new.tag == old.tag:
        return False
    try:
        refused = not remote.delete_if(key, old.tag)
        kept = remote.look(key, 1) == new
        gone = remote.delete_if(key, new.tag) and remote.stat(key) is None
    except OSError:
        return False  # not allowed, or not implemented: only callers that need it refuse to run
    return refused and kept and gone


PRECONDITION_FAILED = 412
RANGE_NOT_SATISFIABLE = 416
CONNECT_TIMEOUT_S = 3
READ_TIMEOUT_S = 10
REQUEST_ATTEMPTS_MAX = 3
"""Attempts of botocore for one request: connection errors, 5xx, throttling."""
CALL_ATTEMPTS_MAX = 2
"""Attempts of s3fs for a call, also after a broken answer. Its default times botocore's is 25: minutes of waiting."""
CONNECTIONS_MAX = 64
SINGLE_PUT_BYTES = 1 << 31
"""s3fs writes up to twice this size with one PUT; a multipart upload is not conditional on every server."""


class S3Remote(Remote):
    """A bucket, or a prefix in one."""

    def __init__(self, fs: Any) -> None:
        super().__init__(fs, conditional=True)
        self._closed = False
        fs.retries = CALL_ATTEMPTS_MAX

    def stat(self, path: str) -> Stat | None:
        bucket, key = self._split(path)
        try:
            # fsspec's info lists the bucket after a miss, to see whether the name is a folder.
            found = self.fs.call_s3("head_object", Bucket=bucket, Key=key)
        except GONE:
            return None
        return stat_of({"size": found["ContentLength"], "LastModified": found.get("LastModified")})

    def look(self, path: str, size_bytes: int) -> Seen | None:
        """Makes one GET, so that tag, stat and first bytes are of one version."""
        from fsspec.asyn import sync

        bucket, key = self._split(path)
        # An empty file has no range to give; a GET without a range answers.
        for part in ({"Range": f"bytes=0-{max(size_bytes, 1) - 1}"}, {}):
            try:
                found, content = sync(self.fs.loop, self._get, bucket, key, part)
            except GONE:
                return None
            except OSError as cause:
                if _status(cause) != RANGE_NOT_SATISFIABLE:
                    raise
                continue
            # "bytes 0-127/8192"; without it the answer is the whole file.
            size = found.get("ContentRange", "").rpartition("/")[2] or found["ContentLength"]
            stat = stat_of({"size": size, "LastModified": found.get("LastModified")})
            return Seen(stat, content[:size_bytes], found.get("ETag"))
        return None

    def create(self, path: str, content: bytes) -> None:
        try:
            super().create(path, content)
        except OSError as cause:
            # s3fs reports it only if the server names the condition; Ceph does not.
            if _status(cause) == PRECONDITION_FAILED:
                raise FileExistsError(f"{path}: refused, the name is taken") from cause
            raise

    def delete_if(self, path: str, tag: str) -> bool:
        bucket, key = self._split(path)
        try:
            # A botocore that does not know IfMatch never sees it: s3fs drops parameters that the library has no name
            # for.
            self.fs.call_s3("delete_object", Bucket=bucket, Key=key, IfMatch=tag)
        except GONE:
            return True
        except OSError as cause:
            if _status(cause) != PRECONDITION_FAILED:
                raise
            # By RFC 9110 a missing file fails the condition too; S3 answers 404 or 204 there.
            return self.stat(path) is None
        return True

    def pages(self, folder: str) -> Iterator[list[FolderEntry]]:
        bucket, key = self._split(folder)
        prefix = f"{key}/" if key else ""
        more: dict[str, Any] = {}
        while True:
            # fsspec's ls collects a folder of any size before it returns.
            page = self.fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter="/", **more)
            found = [FolderEntry(item["Prefix"][len(prefix) : -1], None) for item in page.get("CommonPrefixes", ())]
            found += [
                FolderEntry(
                    item["Key"][len(prefix) :], stat_of({"size": item["Size"], "LastModified": item["LastModified"]})
                )
                for item in page.get("Contents", ())
                if item["Key"] != prefix
            ]
            if found:
                yield found
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def remove_folder(self, folder: str) -> bool:
        return not any(self.pages(folder))

    def copy(self, source: str, path: str) -> None:
        self.fs.cp_file(source, path)

    def close(self) -> None:
        if self.fs._s3 is not None and not self._closed:
            self._closed = True
            self.fs.close_session(self.fs.loop, self.fs._s3)

    async def _get(self, bucket: str, key: str, part: Mapping[str, str]) -> tuple[Mapping[str, Any], bytes]:
        """Returns the answer to a GET, and its body."""
        answer = await self.fs._call_s3("get_object", Bucket=bucket, Key=key, **part)
        try:
            return answer, await answer["Body"].read()
        finally:
            answer["Body"].close()

    def _write(self, path: str, content: bytes, mode: str | None) -> None:
        options = {} if mode is None else {"mode": mode}
        self.fs.pipe_file(path, content, chunksize=SINGLE_PUT_BYTES, **options)

    def _split(self, path: str) -> tuple[str, str]:
        bucket, _, key = path.strip("/").partition("/")
        return bucket, key


def _status(cause: OSError) -> int | None:
    """Returns the HTTP status behind an error of s3fs; None if there was no answer."""
    answer = getattr(cause.__cause__, "response", None) or {}
    status: int | None = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def s3_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options for s3fs: the caller's, with limits on waiting where the caller sets none."""
    # Imported here, because only a root in a bucket needs it.
    from s3fs.core import AioConfig

    config: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "read_timeout": READ_TIMEOUT_S,
        "retries": {"mode": "standard", "total_max_attempts": REQUEST_ATTEMPTS_MAX},
        "max_pool_connections": CONNECTIONS_MAX,
    }
    # Chunks carry checksums of their own. botocore's cost a second pass over the bytes, and some servers answer a range
    # with the checksum of the whole object, which fails every such read. Older botocore has neither option.
    for option in ("request_checksum_calculation", "response_checksum_validation"):
        if option in AioConfig.OPTION_DEFAULTS:
            config[option] = "when_required"
    return {**options, "config_kwargs": {**config, **options.get("config_kwargs", {})}}


_CONDITIONAL = frozenset({"gs", "gcs", "az", "abfs", "abfss"})
"""Schemes whose servers decide whether a name is free."""
RANGE_BYTES_MAX = 32 << 20
"""The most that one GET asks for, so that a read of a large chunk does not hold all of it twice."""


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
        self._staged: dict[Name, bytes] = {}
        self._lock = threading.Lock()  # guards staged bytes

    def stage(self, name: Name, pieces: Pieces, *, stamp_ns: int, durable: bool) -> None:
        content = b"".join(pieces)
        with self._lock:
            if name in self._staged:
                raise Unavailable(f"could not write {name}: the staging name was used before")
            self._staged[name] = content

    def publish(self, staged: Name, name: Name, *, durable: bool) -> bool:
        with self._lock:
            content = self._staged.get(staged)
        if content is None:
            return self._put_back(staged, name)
        won = self._put(name, content)
        self.discard(staged)
        return won

    def discard(self, staged: Name) -> None:
        with self._lock:
            self._staged.pop(staged, None)

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

    def list(self, folder: Name) -> Iterator[FolderEntry]:
        with translated("list", self._at(folder)):
            for page in self._remote.pages(self._at(folder)):
                yield from page

    def sync(self) -> None:
        """Does nothing: what an object store acknowledged is durable."""

    def space(self) -> StorageSpace:
        return StorageSpace(None, None)

    def close(self) -> None:
        with self._lock:
            self._staged.clear()
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


class ObjectReader(FileReader):
    """A file of an ObjectRoot. Each read is a separate GET, which returns the bytes of that moment."""

    __slots__ = ("_path", "_remote", "stat")

    def __init__(self, remote: Remote, path: str, stat: Stat) -> None:
        self._remote = remote
        self._path = path
        self.stat = stat

    def read(self, pieces: Pieces, offset: int, borrowed: BufferLoan) -> int:
        end = min(offset + byte_length(pieces), self.stat.size_bytes)
        start = offset
        while start < end:
            borrowed.check()
            stop = min(end, start + RANGE_BYTES_MAX)
            with translated("read", self._path):
                try:
                    # Read into separate memory: the network may take for ever, and the caller may leave before it ends.
                    content = memoryview(self._remote.read(self._path, start, stop))[: stop - start]
                except OSError as cause:
                    if is_gone(cause):
                        break
                    raise
            with borrowed.writing():
                fill(pieces, content)
            pieces = skip(pieces, len(content))
            start += len(content)
            if start < stop:
                break
        return max(0, start - offset)

    def close(self) -> None:
        """Does nothing: no file is held open between reads."""


def open_object_root(url: str, options: Mapping[str, Any] | None = None) -> ObjectRoot:
    """Connects to the store of ``url``; see ``tried_object_root``.

    ``options`` are those of fsspec for that scheme (``endpoint_url``, ``key``, ...). Raises InvalidRequest for a scheme
    that no library serves, RootMismatch if the bucket does not exist, Unavailable, PermissionDenied.
    """
    return tried_object_root(url, *connect(url, options or {}))


def tried_object_root(url: str, remote: Remote, path: str) -> ObjectRoot:
    """Tries whether writes and deletes of a store can be conditional. Takes ``remote`` over."""
    if not path.strip("/"):
        raise InvalidRequest(f"root {url} names no bucket or folder: expected {url.partition(':')[0]}://BUCKET/PREFIX")
    try:
        conditions = try_conditions(remote, path, RandomIds())
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
            fs, path = url_to_fs(url, **_private(s3_options(options)))
            remote: Remote = S3Remote(fs)
        else:
            fs, path = url_to_fs(url, **_private(options))
            remote = Remote(fs, conditional=scheme in _CONDITIONAL)
    except ImportError as cause:
        extra = "kvstore-llm[s3]" if scheme in ("s3", "s3a") else f"fsspec[{scheme}]"
        raise InvalidRequest(f"root {url}: {cause}: pip install '{extra}'") from cause
    except (TypeError, ValueError) as cause:
        raise InvalidRequest(f"root {url}: {cause}; check its options") from cause
    except OSError as cause:
        raise error_of("open", url, cause) from cause
    return remote, path.rstrip("/")


def _private(options: Mapping[str, Any]) -> dict[str, Any]:
    return {**options, "use_listings_cache": False, "skip_instance_cache": True}
