"""The conditions that a store's server honours: tried on the store itself when it is opened, never assumed.

Separate from ``objects.py``, which relies on the answers. A server that ignores a condition answers as if it had been
met. So does a client library that does not know the condition and omits it. Only a refusal proves anything.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from kvstore.errors import InvalidRequest, RootMismatch
from kvstore.format import places
from kvstore.root.remote import GONE, Remote, translated
from kvstore.sources import Ids


@dataclass(frozen=True, slots=True)
class Conditions:
    """The server's guarantees when several hosts act at once."""

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
    # Use a staging name of a session that nobody has: if this process dies here, fsck clears the file away.
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
    """True if a second creation of ``key``, which holds b"1", is refused. ``rclone serve s3`` writes all the same."""
    try:
        remote.create(key, b"2")
    except OSError:
        return remote.read(key, 0, 1) == b"1"
    return False


def _deletes(remote: Remote, key: str) -> bool:
    """True if deleting a replaced version of ``key`` is refused, and the current version is deleted.

    AWS refuses. Ceph 16 and ``rclone serve s3`` delete all the same. So does every server with a botocore before
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
