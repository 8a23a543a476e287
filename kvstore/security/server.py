"""The security settings of one worker: TLS, the access file, the audit log."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.security.account import Account
from kvstore.security.audit import AuditLog
from kvstore.security.authenticator import Authenticator
from kvstore.security.tls import Certificate


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """All parts are optional on loopback. The caller opens and closes them."""

    tls: Certificate | None = None
    asks_certificates: bool = False
    """True if TLS is mutual."""
    authenticator: Authenticator | None = None
    audit: AuditLog | None = None
    account: Account | None = None
    """The only account whose clients are served; None for every account."""
