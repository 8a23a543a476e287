"""Why a call is denied: errors that carry the reason under which they are counted and written down."""

from __future__ import annotations

import enum

from kvstore.errors import PermissionDenied, Unauthenticated


class Reason(enum.Enum):
    """Each has a counter, ``denied_<value>``."""

    UNAUTHENTICATED = "unauthenticated"
    """Neither a token nor a certificate that names anybody."""
    TOKEN_INVALID = "token_invalid"
    """No token of ours: garbage, another key, another issuer, changed."""
    TOKEN_EXPIRED = "token_expired"
    TOKEN_REVOKED = "token_revoked"
    TOKEN_BINDING = "token_binding"
    """A token bound to a certificate came without it."""
    UNKNOWN_IDENTITY = "unknown_identity"
    """Proved, but not in the access file."""
    METHOD = "method"
    """The method is not in the table."""
    TENANT = "tenant"
    """The identity has no role at all in that tenant."""
    ROLE = "role"
    """It has one, and the method needs a higher one."""


class NotKnown(Unauthenticated):
    """It is not proved who calls."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Denied(PermissionDenied):
    """It is known who calls, and that is not enough."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
