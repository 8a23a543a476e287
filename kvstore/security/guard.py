"""Authenticates and authorises every call of a worker.

Only this module decides that (rules X3 to X9). A denied call is counted, written to the audit log, and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from kvstore.core.metrics import WorkerCount
from kvstore.security.access import (
    ACCOUNT,
    ANYONE,
    CERTIFICATE,
    EVERY,
    PERMISSIONS,
    Denial,
    DenialReason,
    Denied,
    Identity,
    Meter,
    Meters,
    NotKnown,
    OverQuota,
    Permission,
    Presented,
    Role,
    TenantQuota,
    TenantUsage,
    quota_of,
)
from kvstore.security.audit import AuditLog
from kvstore.security.authentication import Account, Authenticator
from kvstore.security.tls import Certificate

_DENIED = {reason: WorkerCount[f"DENIED_{reason.name}"] for reason in DenialReason}
_OVER_QUOTA = {quota: WorkerCount[f"REFUSED_{quota.upper()}_QUOTA"] for quota in ("requests", "bytes", "calls", "pins")}


class AccessGuard:
    """Thread-safe. Without ``authenticator`` every caller may do everything, and only certificates name a caller.

    ``account`` is the only one whose callers are let in then; None for every account.
    """

    def __init__(
        self,
        count: Callable[[WorkerCount], None],
        authenticator: Authenticator | None = None,
        audit: AuditLog | None = None,
        account: Account | None = None,
    ) -> None:
        self.count = count
        self.audit = audit or AuditLog(None)
        self._authenticator = authenticator
        self._account = account
        self.lets_all_in = authenticator is None and account is None
        """True if no caller has to prove anything."""
        self.meters = Meters(time.monotonic)
        self.audit.on_lost = lambda: count(WorkerCount.AUDIT_LOST)
        if authenticator is not None:
            authenticator.on_reload = self.reloaded

    @property
    def is_open(self) -> bool:
        """True if everybody who is let in may do everything."""
        return self._authenticator is None

    @property
    def asks(self) -> bool:
        """True if the caller's identity matters: for its rights, or for the audit log."""
        return self._authenticator is not None or self._account is not None or self.audit.has_file

    def knows(self, presented: Presented) -> bool:
        """True if that proves an identity; a failure is neither counted nor written down."""
        try:
            return bool(self._identified(presented).name)
        except Denial:
            return False

    def identify(self, method: str, presented: Presented, peer: str = "", request_id: str | None = None) -> Identity:
        """Returns the caller's identity. Raises NotKnown or Denied."""
        try:
            return self._identified(presented)
        except Denial as error:
            name = CERTIFICATE + presented.names[0] if presented.names else None
            self._note(error.reason, method, error.claimed or name, peer, request_id)
            raise

    def _identified(self, presented: Presented) -> Identity:
        if self._authenticator is not None:
            return self._authenticator.identify(presented)
        if self._account is not None and not self._account.is_proved_by(presented.account):
            raise NotKnown(
                DenialReason.UNAUTHENTICATED,
                "this worker serves only the account that it runs as, "
                f"{self._account.name.removeprefix(ACCOUNT)!r}: run as that account, or start the worker with "
                "--any-account",
            )
        if presented.names:
            return Identity(CERTIFICATE + presented.names[0], _ALL)
        return Identity(self._account.name if self._account is not None else ANYONE, _ALL)

    def admit(self, method: str, presented: Presented, peer: str = "", request_id: str | None = None) -> Visit:
        """Admits a call. Raises NotKnown; or Denied if the caller may do that with no tenant at all."""
        identity = self.identify(method, presented, peer, request_id)
        permission = PERMISSIONS.get(method)
        visit = Visit(self, method, permission or _NEVER, identity, peer, request_id)
        if self._authenticator is not None:
            if permission is None:
                visit.deny(DenialReason.METHOD, f"method {method!r} is not open to any caller")
            if permission.of_worker:
                visit.allow_every()
            elif max(identity.roles.values(), default=0) < permission.role:
                visit.deny(
                    DenialReason.ROLE,
                    f"identity {identity.name!r} has role {permission.role.name.lower()} for no tenant, which {method} "
                    "needs: ask the operator",
                )
        return visit

    def quota(self, tenant: str) -> TenantQuota:
        return quota_of(tenant, self._authenticator.rules.quotas if self._authenticator is not None else {})

    def usage(self, identity: Identity) -> dict[str, TenantUsage]:
        """Returns what each tenant that the caller may read has used of this worker."""
        return {tenant: used for tenant, used in self.meters.usage().items() if identity.may(Role.READ, tenant)}

    def begin(self, tenant: str) -> Meter:
        """Begins a call of a tenant; the caller owes ``end``. Raises OverQuota."""
        try:
            return self.meters.begin(tenant, self._authenticator.rules.quotas if self._authenticator else {})
        except OverQuota as error:
            self.over_quota(error.quota)
            raise

    def over_quota(self, quota: str) -> None:
        """Counts a call that is refused because of a quota."""
        self.count(_OVER_QUOTA[quota])
        self.count(WorkerCount.QUOTA_REFUSED)

    def reloaded(self, good: bool) -> None:
        """Logs and counts a reload; use as ``Authenticator.on_reload``."""
        self.count(WorkerCount.ACCESS_RELOADS if good else WorkerCount.ACCESS_RELOAD_FAILURES)
        self.audit.write("reload", what="access", outcome="ok" if good else "refused")

    def _note(
        self,
        reason: DenialReason,
        method: str,
        identity: str | None,
        peer: str,
        request_id: str | None,
        tenant: str | None = None,
        namespace: str | None = None,
    ) -> None:
        self.count(_DENIED[reason])
        self.audit.write(
            "denied",
            method=method,
            identity=identity,
            tenant=tenant,
            namespace=namespace,
            outcome=reason.value,
            peer=peer or None,
            request=request_id,
        )


class Visit:
    """One admitted call: its caller and the caller's rights. Used by one thread at a time."""

    def __init__(
        self,
        guard: AccessGuard,
        method: str,
        permission: Permission,
        identity: Identity,
        peer: str = "",
        request_id: str | None = None,
    ) -> None:
        self.identity = identity
        self._guard = guard
        self._method = method
        self._permission = permission
        self._peer = peer
        self._request_id = request_id
        self._tenant: str | None = None
        self._namespace: str | None = None
        self._metered: tuple[str, Meter] | None = None
        self._denied = False

    @property
    def pays(self) -> str | None:
        """The tenant whose quota the call is under; None for none."""
        return self._metered[0] if self._metered is not None else None

    @property
    def sees_every(self) -> bool:
        return self.identity.may(Role.READ, EVERY)

    def may_see(self, tenant: str) -> bool:
        return self.identity.may(Role.READ, tenant)

    def allow(self, tenant: str, namespace: str = "", *, role: Role | None = None, metered: bool = True) -> None:
        """Authorises a call about this tenant. Raises Denied, or OverQuota if the tenant has used up its quota.

        ``role`` is the needed role if it is higher than that of the table.
        """
        self._namespace = namespace or self._namespace
        self._check(tenant, role or self._permission.role)
        if metered and self._metered is None and not self._guard.is_open:
            self._metered = (tenant, self._guard.begin(tenant))
        self._tenant = tenant

    def allow_every(self, role: Role | None = None) -> None:
        """Authorises a call about all tenants. Raises Denied."""
        self._check(EVERY, role or self._permission.role)
        self._tenant = EVERY

    def moved(self, *, bytes_in: int = 0, bytes_out: int = 0) -> None:
        """Counts payload of the call that came in or went out."""
        if self._metered is not None:
            self._guard.meters.moved(self._metered[1], bytes_in, bytes_out)

    def deny(self, reason: DenialReason, message: str, tenant: str | None = None) -> NoReturn:
        """Raises Denied, counted and written to the audit log."""
        self._denied = True
        self._guard._note(
            reason, self._method, self.identity.name, self._peer, self._request_id, tenant, self._namespace
        )
        raise Denied(reason, message)

    def end(self, outcome: str) -> None:
        """Ends the call with this status. Call it once."""
        metered, self._metered = self._metered, None
        if metered is not None:
            self._guard.meters.end(metered[1])
        if self._permission.audited and not self._denied and self._guard.asks:
            self._guard.audit.write(
                "act",
                method=self._method,
                identity=self.identity.name,
                tenant=self._tenant,
                namespace=self._namespace,
                outcome=outcome,
                peer=self._peer or None,
                request=self._request_id,
            )

    def _check(self, tenant: str, role: Role) -> None:
        if self.identity.may(role, tenant):
            return
        whom = "every tenant" if tenant == EVERY else f"tenant {tenant!r}"
        needs = f"{self._method} needs role {role.name.lower()} for {whom}"
        if not self.identity.role_in(tenant):
            self.deny(
                DenialReason.TENANT, f"identity {self.identity.name!r} has no role for {whom}, and {needs}", tenant
            )
        self.deny(
            DenialReason.ROLE,
            f"identity {self.identity.name!r} has a lower role, and {needs}: ask the operator",
            tenant,
        )


_ALL = {EVERY: Role.ADMIN}
_NEVER = Permission(Role.ADMIN, of_worker=True)


# The security settings of one worker: TLS, the access file, the audit log.


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
