"""Which role each method needs: the one table of who may do what (rule X5).

Separate from whoever asks, because it is read by operators, by the worker and by the test that tries every cell of it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

EVERY = "*"
"""Stands for every tenant, in access files and in questions about roles."""


class Role(enum.IntEnum):
    """What an identity may do with a tenant; each includes those before it."""

    READ = 1
    WRITE = 2
    ADMIN = 3


class Scope(enum.Enum):
    """Where the role is needed."""

    TENANT = "tenant"
    """In the tenant of the namespace, pin, hold or ticket that the call is about; in all where it is about all."""
    ANY = "any"
    """In one tenant at least; what is answered is filtered by what the caller may read."""
    EVERY = "every"
    """In every tenant: the call is about the worker itself."""


@dataclass(frozen=True, slots=True)
class Permission:
    """What a method needs, and whether each call of it is written into the audit log."""

    role: Role
    scope: Scope
    audited: bool = False


_READ = Permission(Role.READ, Scope.TENANT)
_WRITE = Permission(Role.WRITE, Scope.TENANT)
_STEER = Permission(Role.ADMIN, Scope.TENANT, audited=True)
_LIST = Permission(Role.READ, Scope.ANY)

PERMISSIONS: dict[str, Permission] = {
    # OpenNamespace of one that is not there yet needs WRITE: it is made (``Call.allow(..., role=)``).
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
    "PutBlocks": _WRITE,
    "MatchBlocks": _READ,
    "GetBlocks": _READ,
    "Move": Permission(Role.WRITE, Scope.TENANT, audited=True),
    "Clear": _STEER,
    "Stats": _LIST,
    "OpenBulk": _LIST,
    # All tenants' chunks lie in it, so it is for those who may read them all.
    "MapMemory": Permission(Role.READ, Scope.EVERY),
    "Reflection": _LIST,
    "Control.Lookup": _READ,
    "Control.BeginMove": Permission(Role.WRITE, Scope.TENANT, audited=True),
    "Control.ClearSelected": _STEER,
    "Control.Recode": _STEER,
    "Control.ListTickets": _LIST,
    "Control.WatchTicket": _READ,
    "Control.CancelTicket": _STEER,
    "Control.Drain": Permission(Role.ADMIN, Scope.EVERY, audited=True),
    "Control.GetLimits": Permission(Role.READ, Scope.EVERY),
    "Control.SetLimits": Permission(Role.ADMIN, Scope.EVERY, audited=True),
    "Control.Health": Permission(Role.READ, Scope.EVERY),
}
"""By the name that ``Calls.serving`` is given. A method that is not here is denied to everybody (rule X4)."""
