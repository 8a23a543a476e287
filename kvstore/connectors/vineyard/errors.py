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


_TWINS: dict[type[KVStoreError], type[KVStoreError]] = {
    InvalidRequest: InvalidCall,
    **{
        kind: type(kind.__name__, (kind, RuntimeError), {"__doc__": f"{kind.__name__}, as a RuntimeError."})
        for kind in (Unavailable, Overloaded, PermissionDenied, RootMismatch, LayoutMismatch, SessionLost)
    },
}
"""The RuntimeError for each error of the store, and for its subclasses."""


@contextmanager
def as_runtime_errors() -> Iterator[None]:
    """Turns each error of the store into its twin, which is a RuntimeError too."""
    try:
        yield
    except KVStoreError as error:
        if isinstance(error, RuntimeError):
            raise
        for kind, twin in _TWINS.items():
            if isinstance(error, kind):
                raise twin(*error.args) from error
        raise
