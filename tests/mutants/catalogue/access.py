"""Guards that admit too much: rules X of security, roles, tokens, certificates, secrets, quotas, the audit log."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.mutants.catalogue.interfaces import at, giving
from tests.mutants.mutant import Mutant, mutant

GUARD = "kvstore.security.guard:Guard"
VISIT = "kvstore.security.guard:Visit"
IDENTITY = "kvstore.security.access:Identity"
BEARER = "kvstore.security.authentication"
QUOTAS = "kvstore.security.access"
SECRETS = "kvstore.security.tls"
MATRIX = "security/test_access_matrix.py"
RULES = "security/test_rules.py"


def _admit_all(real: Any, self: Any, method: str, presented: Any, *rest: Any, **how: Any) -> Any:
    from kvstore.security.access import PERMISSIONS as TABLE
    from kvstore.security.access import Denied
    from kvstore.security.guard import Visit

    try:
        return real(self, method, presented, *rest, **how)
    except Denied:
        return Visit(self, method, TABLE.get(method) or TABLE["Get"], self.identify(method, presented))


def _claims(**changed: Any) -> Any:
    return lambda real, token, keys: replace(real(token, keys), **changed)


def _unsigned(real: Any, token: str, keys: Any) -> Any:
    """Believes the claims of a token, whoever signed it."""
    import base64
    import json

    from kvstore.security.access import NotKnown
    from kvstore.security.authentication import Claims

    try:
        return real(token, keys)
    except NotKnown:
        body = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        return Claims(claims["jti"], claims["sub"], float(claims["iat"]), float(claims["exp"]), b"")


def _anyone(real: Any, self: Any, presented: Any) -> Any:
    from kvstore.security.access import NotKnown

    try:
        return real(self, presented)
    except NotKnown:
        from kvstore.security.access import EVERY, Identity, Role

        return Identity("anyone", {EVERY: Role.ADMIN})


def _read_anyway(real: Any, path: Any, what: str, bytes_max: int = 1 << 20) -> Any:
    with open(path, "rb") as file:
        return file.read()


MUTANTS: list[Mutant] = [
    mutant("access-admits-all", "access X4: a denied call changes nothing", at(GUARD, "admit", _admit_all), MATRIX),
    mutant(
        "access-anyone",
        "access X3: an unauthenticated caller is refused",
        at("kvstore.security.authentication:Authenticator", "identify", _anyone),
        MATRIX,
    ),
    mutant(
        "access-any-tenant",
        "access X5: the role in the tenant",
        at(VISIT, "allow", lambda real, self, tenant, *rest, **how: None),
        MATRIX,
    ),
    mutant(
        "access-any-worker-call",
        "access X5: calls about the worker need every tenant",
        at(VISIT, "allow_every", giving(None)),
        MATRIX,
    ),
    mutant(
        "access-any-role",
        "access X4: a role includes those below it alone",
        at(IDENTITY, "may", lambda real, self, role, tenant: bool(self.role_in(tenant))),
        RULES,
    ),
    mutant(
        "access-role-of-the-table-alone",
        "access X5: creating a namespace needs write",
        at(
            VISIT,
            "allow",
            lambda real, self, tenant, namespace="", *, role=None, metered=True: real(
                self, tenant, namespace, metered=metered
            ),
        ),
        MATRIX,
    ),
    mutant(
        "access-lists-show-all",
        "access X7: lists show what the caller may read",
        at(VISIT, "may_see", giving(True)),
        MATRIX,
    ),
    mutant("access-token-unsigned", "access X3: signature of a token", at(BEARER, "verified", _unsigned), RULES),
    mutant(
        "access-token-never-expires",
        "access X3: an expired token is refused",
        at(BEARER, "verified", _claims(expires_s=1e12)),
        RULES,
    ),
    mutant(
        "access-token-unbound",
        "access X3: a bound token needs its certificate",
        at(BEARER, "verified", _claims(thumbprint=b"")),
        MATRIX,
    ),
    mutant(
        "access-token-not-revoked",
        "access X3: a revoked token is refused",
        at("kvstore.security.authentication", "read_revoked", giving({})),
        MATRIX,
    ),
    mutant(
        "access-secret-readable",
        "access X2: a secret that others can read is refused",
        at(SECRETS, "read_secret", _read_anyway),
        RULES,
    ),
    mutant(
        "access-client-without-certificate",
        "access: mutual TLS",
        at(
            "kvstore.wire.credentials",
            "server_credentials",
            lambda real, certificate, *, asks_certificates: real(certificate, asks_certificates=False),
        ),
        "security/test_hostile.py",
    ),
    mutant(
        "access-other-account",
        "access X12: another account is refused",
        at("kvstore.security.authentication:Account", "is_proved_by", giving(True)),
        "security/test_account.py",
    ),
    mutant(
        "access-quota-ignored", "access X9: quotas of a tenant", at(f"{QUOTAS}:Meter", "refusal", giving(None)), RULES
    ),
    mutant(
        "access-audit-silent",
        "access X10: denials are in the audit log",
        at("kvstore.security.audit:AuditLog", "write", giving(None)),
        "security/test_audit.py",
        RULES,
    ),
    mutant(
        "access-every-host-is-this-one",
        "access X1: without TLS a worker listens on this host alone",
        at("kvstore.security.tls", "is_loopback", giving(True)),
        RULES,
        "security/test_account.py",
    ),
    mutant(
        "access-grant-of-another-client",
        "access X8: a grant is bound to its client",
        at("kvstore.worker.bulk.listener:BulkListener", "grant", lambda real, self, *presented: real(self)),
        "security/test_hostile.py",
        MATRIX,
    ),
]
