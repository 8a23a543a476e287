"""The one table of the role that each method needs (rule X5).

Separate from the guard, because operators, the worker, and the test that tries every cell of it all read it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

EVERY = "*"
"""Stands for every tenant, in access files and in questions about roles."""


class Role(enum.IntEnum):
    """A right of an identity in a tenant; each includes those before it."""

    READ = 1
    WRITE = 2
    ADMIN = 3


class Scope(enum.Enum):
    """The tenants in which the role is needed."""

    TENANT = "tenant"
    """The tenant of the namespace, pin, hold or operation that the call is about; all tenants if it is about all."""
    ANY = "any"
    """At least one tenant; the answer is filtered by what the caller may read."""
    EVERY = "every"
    """Every tenant: the call is about the worker itself."""


@dataclass(frozen=True, slots=True)
class Permission:
    """The role that a method needs, and whether each call of it is written to the audit log."""

    role: Role
    scope: Scope
    audited: bool = False


_READ = Permission(Role.READ, Scope.TENANT)
_WRITE = Permission(Role.WRITE, Scope.TENANT)
_STEER = Permission(Role.ADMIN, Scope.TENANT, audited=True)
_LIST = Permission(Role.READ, Scope.ANY)

PERMISSIONS: dict[str, Permission] = {
    # Opening a namespace that does not exist needs WRITE, because it is made (``Call.allow(..., role=)``).
    "OpenNamespace": _READ,
    "ListNamespaces": _LIST,
    "Match": _READ,
    "Put": _WRITE,
    "Get": _READ,
    "Hold": _READ,
    "Renew": _READ,
    "Release": _READ,
    "Pin": Permission(Role.WRITE, Scope.TENANT, audited=True),
    "Unpin": Permission(Role.WRITE, Scope.TENANT, audited=True),
    "ListPins": _LIST,
    "CountRefs": _READ,
    "MatchBlocks": _READ,
    "Supersede": _WRITE,
    "Clear": _STEER,
    "Stats": _LIST,
    "OpenBulk": _LIST,
    # All tenants' chunks lie in that memory, so only callers that may read them all may map it.
    "MapMemory": Permission(Role.READ, Scope.EVERY),
    "Reflection": _LIST,
    "Control.Lookup": _READ,
    "Control.Prefetch": Permission(Role.WRITE, Scope.TENANT, audited=True),
    "Control.EvictFirst": _WRITE,
    "Control.ClearSelected": _STEER,
    "Control.ListOperations": _LIST,
    "Control.GetOperation": _READ,
    # A clear needs ADMIN, as to begin it (``Call.allow(..., role=)``).
    "Control.CancelOperation": Permission(Role.WRITE, Scope.TENANT, audited=True),
    "Control.Drain": Permission(Role.ADMIN, Scope.EVERY, audited=True),
    "Control.GetLimits": Permission(Role.READ, Scope.EVERY),
    "Control.SetLimits": Permission(Role.ADMIN, Scope.EVERY, audited=True),
    "Control.Health": Permission(Role.READ, Scope.EVERY),
}
"""Permissions by the name given to ``Calls.serving``. A method that is not here is denied to every caller (rule X4)."""
