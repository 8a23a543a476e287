"""Guards that admit too much: rules X of security, roles, tokens, certificates, secrets, quotas, the audit log."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.mutants.catalogue.interfaces import at, giving
from tests.mutants.mutant import Mutant, mutant

GUARD = "kvstore.security.guard:AccessGuard"
VISIT = "kvstore.security.guard:Visit"
IDENTITY = "kvstore.security.access:Identity"
BEARER = "kvstore.security.authentication"
QUOTAS = "kvstore.security.access"
SECRETS = "kvstore.security.tls"
PERMISSIONS = "security/test_access_matrix.py"


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
    mutant("access-admits-all", at(GUARD, "admit", _admit_all), "security/test_access_matrix.py"),
    mutant(
        "access-anyone",
        at("kvstore.security.authentication:Authenticator", "identify", _anyone),
        "security/test_access_matrix.py",
    ),
    mutant(
        "access-any-tenant",
        at(VISIT, "allow", lambda real, self, tenant, *rest, **how: None),
        "security/test_access_matrix.py",
    ),
    mutant("access-any-worker-call", at(VISIT, "allow_every", giving(None)), "security/test_access_matrix.py"),
    mutant(
        "access-any-role",
        at(IDENTITY, "may", lambda real, self, role, tenant: bool(self.role_in(tenant))),
        "security/test_rules.py",
    ),
    mutant(
        "access-role-of-the-table-alone",
        at(
            VISIT,
            "allow",
            lambda real, self, tenant, namespace="", *, role=None, metered=True: real(
                self, tenant, namespace, metered=metered
            ),
        ),
        "security/test_access_matrix.py",
    ),
    mutant("access-lists-show-all", at(VISIT, "may_see", giving(True)), "security/test_access_matrix.py"),
    mutant("access-token-unsigned", at(BEARER, "verified", _unsigned), "security/test_rules.py"),
    mutant("access-token-never-expires", at(BEARER, "verified", _claims(expires_s=1e12)), "security/test_rules.py"),
    mutant("access-token-unbound", at(BEARER, "verified", _claims(thumbprint=b"")), "security/test_access_matrix.py"),
    mutant(
        "access-token-not-revoked",
        at("kvstore.security.authentication", "read_revoked", giving({})),
        "security/test_access_matrix.py",
    ),
    mutant("access-secret-readable", at(SECRETS, "read_secret", _read_anyway), "security/test_rules.py"),
    mutant(
        "access-client-without-certificate",
        at(
            "kvstore.worker.server",
            "server_credentials",
            lambda real, certificate, *, asks_certificates: real(certificate, asks_certificates=False),
        ),
        "security/test_hostile.py",
    ),
    mutant(
        "access-other-account",
        at("kvstore.security.authentication:Account", "is_proved_by", giving(True)),
        "security/test_account.py",
    ),
    mutant("access-quota-ignored", at(f"{QUOTAS}:Meter", "refusal", giving(None)), "security/test_rules.py"),
    mutant(
        "access-audit-silent", at("kvstore.security.audit:AuditLog", "write", giving(None)), "security/test_rules.py"
    ),
    mutant(
        "access-every-host-is-this-one",
        at("kvstore.security.tls", "is_loopback", giving(True)),
        "security/test_rules.py security/test_account.py",
    ),
    mutant(
        "access-grant-of-another-client",
        at("kvstore.worker.data_server:BulkListener", "grant", lambda real, self, *presented: real(self)),
        "security/test_hostile.py security/test_access_matrix.py",
    ),
]
