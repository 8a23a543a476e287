"""Identities of callers with their roles, and the proofs that callers present."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.security.permissions import EVERY, Role

CERTIFICATE = "cert:"
"""The prefix of names of identities that come from a certificate."""
ACCOUNT = "account:"
"""The prefix of the name of a caller that proved the account that the worker runs as."""
ANYONE = "anyone"
"""The name of a caller that has to prove nothing."""


@dataclass(frozen=True, slots=True)
class Presented:
    """The proofs of a caller: the names in a certificate that TLS has verified, its SHA-256, a token, and its
    account.

    Only the certificate is verified so far. It has no representation: tokens are secrets.
    """

    names: tuple[str, ...] = ()
    """URIs of the subject alternative name; the common name if there are none."""
    thumbprint: bytes = b""
    """SHA-256 over the certificate (DER); empty without one."""
    token: str | None = field(default=None, repr=False)
    account: str = field(default="", repr=False)
    """What proves the account that the caller runs as (``account.py``)."""


NOTHING = Presented()


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller whose name is proved, and its roles by tenant, from the access file."""

    name: str
    roles: Mapping[str, Role] = field(default_factory=dict)

    def role_in(self, tenant: str) -> int:
        """Returns the highest role in a tenant, or in every tenant (EVERY); 0 for none."""
        return max(self.roles.get(tenant, 0), self.roles.get(EVERY, 0))

    def may(self, role: Role, tenant: str) -> bool:
        """True if it has at least this role in a tenant, or in every tenant (EVERY)."""
        return self.role_in(tenant) >= role

    def may_somewhere(self, role: Role) -> bool:
        """True if it has at least this role in any tenant."""
        return max(self.roles.values(), default=0) >= role
