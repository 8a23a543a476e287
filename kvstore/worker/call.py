"""One call as the worker's code sees it: what its client allows, and who that is and what it may do.

Wraps gRPC's context, or that of the bulk protocol, so that whoever serves a call cannot lose sight of whose it is.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Callable
from typing import Any

import grpc

from kvstore.security.guard import Visit
from kvstore.security.identity import Presented
from kvstore.security.permissions import Role
from kvstore.tracing import REQUEST_ID_CHARS_MAX, REQUEST_ID_KEY
from kvstore.worker.context import BulkContext

AUTHORIZATION = "authorization"
BEARER = "bearer "


class Call:
    """A ``CallContext`` that was let in. Used by one thread at a time."""

    def __init__(self, context: Any, visit: Visit) -> None:
        self._context = context
        self._visit = visit

    # Who calls

    @property
    def identity(self) -> str:
        """The name of who calls: ``cert:NAME``, a token's subject, or ``anyone`` where nobody is asked."""
        return self._visit.identity.name

    @property
    def visit(self) -> Visit:
        """Its place in the guard's book."""
        return self._visit

    @property
    def sees_every(self) -> bool:
        """Whether who calls may read every tenant."""
        return self._visit.sees_every

    @property
    def presented(self) -> Presented:
        """What its client shows."""
        return presented_by(self._context)

    def may(self, role: Role, tenant: str) -> bool:
        """Whether who calls has a role for a tenant; asks, and denies nothing."""
        return self._visit.identity.may(role, tenant)

    def may_see(self, tenant: str) -> bool:
        """Whether what belongs to a tenant may be shown to who calls."""
        return self._visit.may_see(tenant)

    def allow(self, tenant: str, namespace_name: str = "", *, role: Role | None = None, metered: bool = True) -> None:
        """The call is about this tenant. Raises PermissionDenied; Overloaded over the tenant's quota."""
        self._visit.allow(tenant, namespace_name, role=role, metered=metered)

    def allow_every(self) -> None:
        """The call is about all tenants, or the worker itself. Raises PermissionDenied."""
        self._visit.allow_every()

    # What its client allows: see ``CallContext``

    def time_remaining(self) -> float | None:
        """Seconds the client still waits; None where it did not say."""
        left_s: float | None = self._context.time_remaining()
        return left_s

    def invocation_metadata(self) -> Any:
        """What the client sent with the call."""
        return self._context.invocation_metadata()

    def is_active(self) -> bool:
        """Whether the client is there."""
        return bool(self._context.is_active())

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Calls back when the call ends; False where it has ended already. gRPC only."""
        return bool(self._context.add_callback(callback))

    def cancel(self) -> bool:
        """Ends the call. gRPC only."""
        return bool(self._context.cancel())

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """What goes with a refusal."""
        self._context.set_trailing_metadata(trailing_metadata)

    def abort(self, code: grpc.StatusCode, details: str) -> Any:
        """Raises, so that the call ends with this status."""
        return self._context.abort(code, details)


def presented_by(context: Any) -> Presented:
    """What the client of a call shows. Of a certificate only what TLS has verified."""
    if isinstance(context, BulkContext):
        return context.presented
    metadata = dict(context.invocation_metadata() or ())
    header = str(metadata.get(AUTHORIZATION, ""))
    token = header[len(BEARER) :].strip() if header.lower().startswith(BEARER) else None
    shown = context.auth_context()
    pem = b"".join(shown.get("x509_pem_cert", ()))
    if not pem:
        return Presented(token=token)
    names = [*shown.get("peer_uri", ()), *shown.get("x509_uri", ())] or [*shown.get("x509_common_name", ())]
    thumbprint = hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))).digest()
    return Presented(tuple(name.decode(errors="replace") for name in dict.fromkeys(names)), thumbprint, token)


def request_of(context: Any) -> str | None:
    """The id that the client gave the call, where nobody has looked at it yet."""
    said = dict(context.invocation_metadata() or ()).get(REQUEST_ID_KEY)
    return str(said)[:REQUEST_ID_CHARS_MAX] if said is not None else None


def peer_of(context: Any) -> str:
    """Where a call comes from, as far as is known."""
    return context.path if isinstance(context, BulkContext) else str(context.peer())
