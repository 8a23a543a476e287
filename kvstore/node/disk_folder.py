"""The folder of a local disk tier: locked by one node at a time, and never mistaken for a root, nor a root for it.

Separate from the tier, which treats every chunk file in its folder as its own to remove: this module makes sure of
that.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvstore.errors import InvalidRequest, KVStoreError, PermissionDenied, Unavailable
from kvstore.format import places
from kvstore.parsing import parse_json
from kvstore.recency import NS_PER_S
from kvstore.root.identity import FILE_SYSTEMS_OWN, FORMAT_BYTES_MAX, TOP, read_small
from kvstore.root.interface import Root
from kvstore.root.posix import REFUSED_ERRORS, PosixRoot
from kvstore.sources import Clock, Ids

FORMAT_NAME = "kvstore-disk"
"""The name in ``FORMAT``. It keeps this folder from being opened as a root, and this module refuses other names."""
VERSION = 1
SHARD_BITS = 8
LOCK = "lock"

_OURS_BEFORE_FORMAT = frozenset({LOCK, places.STAGING}) | FILE_SYSTEMS_OWN
"""Names that a folder may hold before it becomes a disk tier: a node killed while making one leaves some."""


class DiskFolder:
    """The folder at ``path``; ``make_root`` gives access to its files."""

    def __init__(self, path: str, clock: Clock, ids: Ids, make_root: Callable[[str], Root] = PosixRoot) -> None:
        self.path = os.path.abspath(path)
        self._clock = clock
        self._ids = ids
        self._make_root = make_root
        self._lock_fd = -1
        self.block_bytes = 0
        """Block size of the file system, in bytes; 0 until the folder is open."""

    def open(self) -> Root:
        """Makes the folder if it is missing, locks it, and returns access to its files, which are then this node's.

        Raises InvalidRequest if another node has it, or if it is a root or holds anything else; PermissionDenied,
        Overloaded, Unavailable.
        """
        self._refuse_inside()
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
        except OSError as cause:
            raise _refusal(self.path, "could not be made", cause) from cause
        root = self._make_root(self.path)
        is_marked = self._is_marked(root)  # check first: leave no lock file in somebody else's folder
        self._lock()
        try:
            self.block_bytes = self._find_block_bytes()
            if not is_marked and not self._is_marked(root):
                self._mark(root)
        except BaseException:
            self.unlock()
            raise
        return root

    def _refuse_inside(self) -> None:
        """Raises InvalidRequest if the folder lies within a root or another disk tier, where it would be foreign."""
        for above in Path(self.path).parents:
            with suppress(OSError), open(above / places.FORMAT, "rb") as file:
                if b'"format": "kvstore' in file.read(FORMAT_BYTES_MAX):
                    raise InvalidRequest(
                        f"disk tier {self.path} lies within {above}, which is a root or another disk tier: "
                        "give a folder outside of it"
                    )

    def unlock(self) -> None:
        """Unlocks the folder, so that another node may have it. Idempotent."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def _find_block_bytes(self) -> int:
        try:
            return os.statvfs(self.path).f_frsize
        except OSError as cause:
            raise _refusal(self.path, "could not be looked at", cause) from cause

    def _lock(self) -> None:
        path = f"{self.path}/{LOCK}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as cause:
            raise _refusal(path, "could not be opened", cause) from cause
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            os.close(fd)
            if cause.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise InvalidRequest(
                    f"disk tier {self.path} is in use by another node: give each node of a host a folder of its own"
                ) from cause
            raise _refusal(path, "could not be locked", cause) from cause
        self._lock_fd = fd

    def _is_marked(self, root: Root) -> bool:
        """True if the folder is a disk tier; False if it may become one. Raises InvalidRequest otherwise."""
        content = read_small(root, places.FORMAT, FORMAT_BYTES_MAX)
        if content is None:
            for entry in root.list(TOP):
                if entry.name not in _OURS_BEFORE_FORMAT and entry.name != places.FORMAT:
                    raise InvalidRequest(
                        f"disk tier {self.path} holds {entry.name!r}, which is not of a disk tier: give an empty folder"
                    )
            return False
        try:
            fields = parse_json(content)
            name, version = fields["format"], fields["version"]
        except (ValueError, KeyError, TypeError):
            name, version = "", 0
        if name != FORMAT_NAME:
            raise InvalidRequest(
                f"disk tier {self.path} is a root, or something else: its FORMAT begins with {content[:60]!r}; "
                "give a folder that no root is in"
            )
        if version != VERSION:
            raise InvalidRequest(
                f"disk tier {self.path} has version {version!r}, this kvstore knows version {VERSION}: "
                "give another folder, or empty this one (it is a cache)"
            )
        return True

    def _mark(self, root: Root) -> None:
        session = self._ids.fresh()
        staged = places.staged(session, 0)
        content = json.dumps({"format": FORMAT_NAME, "version": VERSION}).encode() + b"\n"
        try:
            # The only synced file: torn by a crash of the host, it would keep the tier from being opened again.
            root.stage(staged, [memoryview(content)], stamp_ns=int(self._clock.now_s()) * NS_PER_S, durable=True)
            root.publish(staged, places.FORMAT, durable=True)
        finally:
            root.discard(staged)
            root.remove_folder(places.staging_folder(session))


def _refusal(path: str, what: str, cause: OSError) -> KVStoreError:
    said = f"disk tier {path} {what}: {cause.strerror or cause}"
    if cause.errno in REFUSED_ERRORS:
        return PermissionDenied(f"{said}; give a folder that this user may write to")
    if cause.errno in (errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.EISDIR, errno.ENOTSUP, errno.ENOLCK):
        return InvalidRequest(f"{said}; give a folder on a local disk")
    return Unavailable(f"{said}; check the disk")
