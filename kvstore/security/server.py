"""What secures one worker, as it is given to it: TLS, the access file, the audit log."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.security.audit import AuditLog
from kvstore.security.authenticator import Authenticator
from kvstore.security.tls import Certificate


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """Nothing of it is needed on loopback. The caller opens and closes what is in it."""

    tls: Certificate | None = None
    asks_certificates: bool = False
    """Whether TLS is mutual."""
    authenticator: Authenticator | None = None
    audit: AuditLog | None = None
