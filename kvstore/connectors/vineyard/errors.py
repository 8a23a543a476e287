"""The store's errors as RuntimeErrors too: the only class that Vineyard raised, and so what its users catch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.errors import (
    InvalidRequest,
    KVStoreError,
    LayoutMismatch,
    Overloaded,
    PermissionDenied,
    RootMismatch,
    SessionLost,
    Unavailable,
)


class InvalidCall(InvalidRequest, RuntimeError):
    """InvalidRequest, as a RuntimeError."""


class CallUnavailable(Unavailable, RuntimeError):
    """Unavailable, as a RuntimeError."""


class CallOverloaded(Overloaded, RuntimeError):
    """Overloaded (no space on the root, for one), as a RuntimeError."""


class CallDenied(PermissionDenied, RuntimeError):
    """PermissionDenied, as a RuntimeError."""


class WrongRoot(RootMismatch, RuntimeError):
    """RootMismatch, as a RuntimeError."""


class WrongLayout(LayoutMismatch, RuntimeError):
    """LayoutMismatch, as a RuntimeError."""


class CallSessionLost(SessionLost, RuntimeError):
    """SessionLost, as a RuntimeError."""


_TWINS: tuple[tuple[type[KVStoreError], type[KVStoreError]], ...] = (
    (InvalidRequest, InvalidCall),
    (Unavailable, CallUnavailable),
    (Overloaded, CallOverloaded),
    (PermissionDenied, CallDenied),
    (RootMismatch, WrongRoot),
    (LayoutMismatch, WrongLayout),
    (SessionLost, CallSessionLost),
)


@contextmanager
def as_runtime_errors() -> Iterator[None]:
    """Around calls into the store: what it raises comes out as the same class and a RuntimeError."""
    try:
        yield
    except KVStoreError as error:
        if isinstance(error, RuntimeError):
            raise
        for kind, twin in _TWINS:
            if isinstance(error, kind):
                raise twin(*error.args) from error
        raise
