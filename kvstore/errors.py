"""The errors a caller can meet, grouped by what the caller does about them.

A miss is a value, never an exception, and a damaged chunk is a miss (counted in ``stats()``).  Errors of
other libraries are translated into these once, at the rim, with the cause attached.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of every error raised by this package."""


class InvalidRequest(KVStoreError, ValueError):
    """The request itself is wrong (shape, dtype, negative token, over a limit). Fix the call; do not retry."""


class LayoutMismatch(KVStoreError):
    """The namespace exists with another layout. Use the same layout, or another namespace name."""


class RootMismatch(KVStoreError):
    """Not the root that was expected: a wrong mount, another cluster's root, or an unknown format version."""


class Unavailable(KVStoreError):
    """Something needed did not answer in time. Retry later; the engine goes on without the cache."""


class HoldBroken(Unavailable):
    """A held chunk could no longer be read while layers were being handed out.

    ``tokens_valid`` leading tokens are unaffected; compute the rest again.
    """

    def __init__(self, message: str, tokens_valid: int = 0) -> None:
        super().__init__(message)
        self.tokens_valid = tokens_valid


class Overloaded(KVStoreError):
    """A limit was reached (queue, memory, space on the root). Back off."""


class SessionLost(KVStoreError):
    """This node's session in etcd ended, and with it its holds and pins. Take them again."""


class PermissionDenied(KVStoreError):
    """The root, etcd or the worker refused this identity. Ask the operator for access."""


class Unauthenticated(PermissionDenied):
    """It is not proved who calls: no token or certificate, or one that is expired or revoked. Get a new one."""
