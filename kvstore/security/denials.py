"""Denials: errors with the reason under which they are counted and written to the audit log."""

from __future__ import annotations

import enum

from kvstore.errors import PermissionDenied, Unauthenticated


class Reason(enum.Enum):
    """The reasons of denials; each has a counter, ``denied_<value>``."""

    UNAUTHENTICATED = "unauthenticated"
    """Neither a token nor a certificate that names anybody."""
    TOKEN_INVALID = "token_invalid"
    """Not one of our tokens: garbage, another key, another issuer, or changed."""
    TOKEN_EXPIRED = "token_expired"
    TOKEN_REVOKED = "token_revoked"
    TOKEN_BINDING = "token_binding"
    """A token that is bound to a certificate came without it."""
    UNKNOWN_IDENTITY = "unknown_identity"
    """The caller's name is proved, but is not in the access file."""
    METHOD = "method"
    """The method is not in the table."""
    TENANT = "tenant"
    """The identity has no role at all in that tenant."""
    ROLE = "role"
    """The identity has a role there, and the method needs a higher one."""


class NotKnown(Unauthenticated):
    """The caller's identity is not proved. ``claimed`` is the one that its token names, if the signature is right."""

    def __init__(self, reason: Reason, message: str, claimed: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.claimed = claimed


class Denied(PermissionDenied):
    """The caller's identity is proved, and may not do this. ``claimed`` is it, if the access file does not name it."""

    def __init__(self, reason: Reason, message: str, claimed: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.claimed = claimed
