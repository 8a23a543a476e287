"""One call as the worker's code sees it: its client's context, identity and permissions.

Wraps the context of gRPC or of the bulk protocol, so that the code that serves a call always knows whose it is.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Callable
from typing import Any

import grpc

from kvstore.security.account import HEADER
from kvstore.security.guard import Visit
from kvstore.security.identity import Presented
from kvstore.security.permissions import Role
from kvstore.tracing import REQUEST_ID_CHARS_MAX, REQUEST_ID_KEY
from kvstore.worker.context import BulkContext

AUTHORIZATION = "authorization"
BEARER = "bearer "


class Call:
    """An admitted ``CallContext``. Used by one thread at a time."""

    def __init__(self, context: Any, visit: Visit) -> None:
        self._context = context
        self._visit = visit

    # The caller

    @property
    def identity(self) -> str:
        """The caller's name: ``cert:NAME``, a token's subject, ``account:NAME``, or ``anyone``."""
        return self._visit.identity.name

    @property
    def visit(self) -> Visit:
        """The call's entry in the guard's book."""
        return self._visit

    @property
    def sees_every(self) -> bool:
        """True if the caller may read every tenant."""
        return self._visit.sees_every

    @property
    def presented(self) -> Presented:
        """The credentials that the client presented."""
        return presented_by(self._context)

    def may(self, role: Role, tenant: str) -> bool:
        """True if the caller has a role for a tenant. Only asks; denies nothing."""
        return self._visit.identity.may(role, tenant)

    def may_see(self, tenant: str) -> bool:
        """True if the caller may see what belongs to a tenant."""
        return self._visit.may_see(tenant)

    def allow(self, tenant: str, namespace_name: str = "", *, role: Role | None = None, metered: bool = True) -> None:
        """Authorises the call for a tenant. Raises PermissionDenied; Overloaded over the tenant's quota."""
        self._visit.allow(tenant, namespace_name, role=role, metered=metered)

    def allow_every(self) -> None:
        """Authorises the call for all tenants, or for the worker itself. Raises PermissionDenied."""
        self._visit.allow_every()

    # The client's context: see ``CallContext``

    def time_remaining(self) -> float | None:
        """Seconds that the client still waits; None if it did not say."""
        left_s: float | None = self._context.time_remaining()
        return left_s

    def invocation_metadata(self) -> Any:
        """The metadata that the client sent with the call."""
        return self._context.invocation_metadata()

    def is_active(self) -> bool:
        """True while the client is connected."""
        return bool(self._context.is_active())

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Calls back when the call ends; False if it has already ended. gRPC only."""
        return bool(self._context.add_callback(callback))

    def cancel(self) -> bool:
        """Ends the call. gRPC only."""
        return bool(self._context.cancel())

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """Sets the metadata that a refusal carries."""
        self._context.set_trailing_metadata(trailing_metadata)

    def abort(self, code: grpc.StatusCode, details: str) -> Any:
        """Raises, so that the call ends with this status."""
        return self._context.abort(code, details)


def presented_by(context: Any) -> Presented:
    """Returns the client's credentials; of a certificate only what TLS has verified."""
    if isinstance(context, BulkContext):
        return context.presented
    metadata = dict(context.invocation_metadata() or ())
    header = str(metadata.get(AUTHORIZATION, ""))
    token = header[len(BEARER) :].strip() if header.lower().startswith(BEARER) else None
    shown = context.auth_context()
    pem = b"".join(shown.get("x509_pem_cert", ()))
    account = str(metadata.get(HEADER, ""))
    if not pem:
        return Presented(token=token, account=account)
    names = [*shown.get("peer_uri", ()), *shown.get("x509_uri", ())] or [*shown.get("x509_common_name", ())]
    thumbprint = hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))).digest()
    return Presented(tuple(name.decode(errors="replace") for name in dict.fromkeys(names)), thumbprint, token, account)


def request_of(context: Any) -> str | None:
    """Returns the id that the client gave the call, before anything else has read it."""
    said = dict(context.invocation_metadata() or ()).get(REQUEST_ID_KEY)
    return str(said)[:REQUEST_ID_CHARS_MAX] if said is not None else None


def peer_of(context: Any) -> str:
    """Returns the client's address, as far as it is known."""
    return context.path if isinstance(context, BulkContext) else str(context.peer())
