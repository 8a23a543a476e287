"""The errors a caller can meet, grouped by what the caller does about them.

A miss is a value, never an exception, and a damaged chunk is a miss (counted in ``stats()``).  Errors of
other libraries are translated into these once, at the rim, with the cause attached.
"""

from __future__ import annotations

from typing import ClassVar


class KVStoreError(Exception):
    """Base of every error raised by this package."""


class InvalidRequest(KVStoreError, ValueError):
    """The request itself is wrong (shape, dtype, negative token, over a limit). Fix the call; do not retry."""


class StoreClosed(KVStoreError):
    """The store was closed, before the call or while it ran. Open it again.

    Caches, holds and pins end with their store. A call that ran while another thread closed the store may have had its
    effect.
    """

    def __init__(self, message: str = "the store is closed: open it again (kvstore.open, kvstore.connect)") -> None:
        super().__init__(message)


class LayoutMismatch(KVStoreError):
    """The namespace exists with another layout. Use the same layout, or another namespace name."""


class RootMismatch(KVStoreError):
    """Not the root that was expected: a wrong mount, another cluster's root, or an unknown format version."""


class Unavailable(KVStoreError):
    """Something needed did not answer in time. Retry later; the engine goes on without the cache."""


class HoldBroken(Unavailable):
    """The hold protects nothing any more, or a held chunk was lost while layers were being handed out.

    It ended (released, past its time), its session was lost, or its worker does not answer. ``tokens_valid`` leading
    tokens that were handed out before are good; match again, or compute the rest.
    """

    def __init__(self, message: str, tokens_valid: int = 0) -> None:
        super().__init__(message)
        self.tokens_valid = tokens_valid


class Overloaded(KVStoreError):
    """A limit was reached (queue, memory, quota, space on the root). Back off."""

    reason: ClassVar[str] = "overload"
    """The ``PutResult.reason`` of a put that is refused with this error."""


class StoreFull(Overloaded):
    """The store has no space: all of it is held or pinned, the disk is full, or the put is larger than the store."""

    reason = "full"


class SessionLost(KVStoreError):
    """This node's session in etcd ended, and with it its holds and pins. Take them again."""


class PermissionDenied(KVStoreError):
    """The root, etcd or the worker refused this identity. Ask the operator for access."""


class Unauthenticated(PermissionDenied):
    """The caller is not authenticated: no token or certificate, or one that is expired or revoked. Get a new one."""
