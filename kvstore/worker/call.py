"""One call as the worker's code sees it: its client's context, identity and permissions.

Wraps the context of gRPC or of the bulk protocol, so that the code that serves a call always knows whose it is: calls
of either kind are let in, timed and refused by the same code.
"""

from __future__ import annotations

import hashlib
import ssl
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Protocol

import grpc

from kvstore.security.access import NOTHING, Presented, Role
from kvstore.security.authentication import HEADER
from kvstore.security.guard import Visit
from kvstore.tracing import REQUEST_ID_KEY, Metadata, accepted
from kvstore.wire.bulk.channel import Channel
from kvstore.wire.statuses import Refusal

AUTHORIZATION = "authorization"
BEARER = "bearer "


class CallContext(Protocol):
    """What a call knows of its client: gRPC's context, or that of the bulk protocol."""

    def time_remaining(self) -> float | None:
        """Seconds the client still waits; None where it did not say."""
        ...

    def invocation_metadata(self) -> Any:
        """What the client sent with the call: pairs of a key and a value."""
        ...

    def is_active(self) -> bool:
        """Whether the client is there."""
        ...

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """What goes with a refusal."""
        ...

    def abort(self, code: grpc.StatusCode, details: str) -> Any:
        """Raises, so that the call ends with this status."""
        ...


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

    def allow_every(self, role: Role | None = None) -> None:
        """Authorises the call for all tenants, or for the worker itself. Raises PermissionDenied."""
        self._visit.allow_every(role)

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


class Refused(Exception):
    """A request was answered with a status; carries it to the sender."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class BulkContext:
    """A ``CallContext`` of the bulk protocol: what a request allows: its time, and how it is refused."""

    def __init__(
        self, channel: Channel, timeout_s: float, metadata: Metadata = (), presented: Presented = NOTHING
    ) -> None:
        self._channel = channel
        self.presented = presented
        """The client's credentials from its request to connect."""
        self._metadata = metadata
        self._ends_s = time.monotonic() + timeout_s
        self._trailers: tuple[tuple[str, str], ...] = ()

    def time_remaining(self) -> float | None:
        """Seconds that the client still waits."""
        return max(0.0, self._ends_s - time.monotonic())

    @property
    def path(self) -> str:
        """The path that the request came on."""
        return "unix" if self._channel.is_unix else "tcp"

    def invocation_metadata(self) -> Metadata:
        """Metadata of the call that this request belongs to."""
        return self._metadata

    def is_active(self) -> bool:
        """True while the client is connected."""
        return self._channel.alive

    def set_trailing_metadata(self, trailing_metadata: Iterable[tuple[str, str]]) -> None:
        """Sets the metadata that a refusal carries."""
        self._trailers = tuple(trailing_metadata)

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """Raises Refused."""
        raise Refused(Refusal(code, details, self._trailers))


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


def request_of(context: Any) -> str:
    """Returns the call's id before anything else has read it: the client's, or a fresh one."""
    return accepted(dict(context.invocation_metadata() or ()).get(REQUEST_ID_KEY))


def peer_of(context: Any) -> str:
    """Returns the client's address, as far as it is known."""
    return context.path if isinstance(context, BulkContext) else str(context.peer())
