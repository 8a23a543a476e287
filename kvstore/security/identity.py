"""Who a caller is and which roles that gives; and what a caller shows to prove it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.security.permissions import EVERY, Role

CERTIFICATE = "cert:"
"""What the names of identities begin with that come from a certificate."""
ANYONE = "anyone"
"""Who calls where no access file says who is who, and no certificate was asked for."""


@dataclass(frozen=True, slots=True)
class Presented:
    """What a caller shows: the names in a certificate that TLS has verified, its SHA-256, and a token.

    Nothing of it is believed of itself but the certificate.  Never shown in a representation: tokens are secrets.
    """

    names: tuple[str, ...] = ()
    """URIs of the subject alternative name; the common name where there is none."""
    thumbprint: bytes = b""
    """SHA-256 over the certificate (DER); empty without one."""
    token: str | None = field(default=None, repr=False)


NOTHING = Presented()


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller whose name is proved, and the roles that the access file gives it, by tenant."""

    name: str
    roles: Mapping[str, Role] = field(default_factory=dict)

    def role_in(self, tenant: str) -> int:
        """The highest role in a tenant, or in every tenant (EVERY); 0 for none."""
        return max(self.roles.get(tenant, 0), self.roles.get(EVERY, 0))

    def may(self, role: Role, tenant: str) -> bool:
        """Whether it has at least this role in a tenant, or in every tenant (EVERY)."""
        return self.role_in(tenant) >= role

    def may_somewhere(self, role: Role) -> bool:
        """Whether it has at least this role in any tenant."""
        return max(self.roles.values(), default=0) >= role
