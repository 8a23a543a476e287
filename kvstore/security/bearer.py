"""Bearer tokens: signed with Ed25519, expiring, with an id that can be revoked, and bound to a certificate if wanted.

They are JSON web tokens (RFC 7519), bound by RFC 8705 section 3.1. Workers have public keys only, so a compromised
worker cannot issue tokens. Needs the ``security`` extra.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.security.denials import NotKnown, Reason
from kvstore.security.identity import CERTIFICATE
from kvstore.security.rules import NAME_BYTES_MAX

ALGORITHM = "EdDSA"
ISSUER = AUDIENCE = "kvstore"
TTL_S_MAX = 7 * 86_400
"""A token that lives longer is refused, whoever signed it: a stolen token must expire."""
TIME_S_MAX = 1 << 40
"""Beyond every time that makes sense."""
SKEW_S = 60
"""Allowed difference between the clocks of issuer and verifier."""
TOKEN_BYTES_MAX = 4096
_BINDING = "x5t#S256"


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims of a token whose signature was right."""

    id: str
    identity: str
    issued_s: float
    expires_s: float
    thumbprint: bytes
    """Thumbprint of the certificate that has to come with it; empty for any or none."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key for verifying tokens; ``id`` finds it."""

    id: str
    key: Any

    @classmethod
    def of_pem(cls, pem: bytes, where: str) -> PublicKey:
        """Parses a PEM file. Raises InvalidRequest."""
        serialization, ed25519 = _library("serialization"), _library("asymmetric.ed25519")
        try:
            key = serialization.load_pem_public_key(pem)
        except ValueError as cause:
            raise InvalidRequest(f"the token key {where!r} is not a public key in PEM format") from cause
        if not isinstance(key, ed25519.Ed25519PublicKey):
            raise InvalidRequest(f"the token key {where!r} is of another kind: expected Ed25519 (kvstore token key)")
        return cls(_key_id(key), key)


def issue(private_pem: bytes, identity: str, token_id: str, now_s: float, ttl_s: float, thumbprint: bytes = b"") -> str:
    """Issues a token for ``identity``. Raises InvalidRequest."""
    check_identity(identity)
    if not 1 <= ttl_s <= TTL_S_MAX:
        raise InvalidRequest(f"a token for {ttl_s:g} s: expected 1 s to {TTL_S_MAX} s (7 days)")
    key = _private_key(private_pem)
    claims: dict[str, Any] = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": identity,
        "jti": token_id,
        "iat": int(now_s),
        "exp": int(now_s + ttl_s),
    }
    if thumbprint:
        claims["cnf"] = {_BINDING: base64.urlsafe_b64encode(thumbprint).rstrip(b"=").decode()}
    token: str = _jwt().encode(claims, key, ALGORITHM, headers={"kid": _key_id(key.public_key())})
    return token


def verified(token: str, keys: dict[str, PublicKey]) -> Claims:
    """Verifies a token's signature and returns its claims. Raises NotKnown (TOKEN_INVALID).

    The caller checks whether the token has expired or was revoked.
    """
    jwt = _jwt()
    if len(token) > TOKEN_BYTES_MAX:
        raise _invalid(f"it has {len(token)} bytes: expected at most {TOKEN_BYTES_MAX}")
    try:
        key = keys.get(str(jwt.get_unverified_header(token).get("kid")))
        if key is None:
            raise _invalid("it is signed with a key that is not in the access file")
        claims = jwt.decode(
            token,
            key.key,
            algorithms=[ALGORITHM],
            audience=AUDIENCE,
            issuer=ISSUER,
            options={"require": ["exp", "iat", "sub", "jti"], "verify_exp": False, "verify_iat": False},
        )
    except jwt.PyJWTError as cause:
        raise _invalid("its signature or its claims are wrong") from cause
    return _claims(claims)


def new_key() -> tuple[bytes, bytes]:
    """Makes a private key and its public one, as PEM."""
    serialization, ed25519 = _library("serialization"), _library("asymmetric.ed25519")
    key = ed25519.Ed25519PrivateKey.generate()
    private: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public: bytes = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return private, public


def check_identity(name: str) -> None:
    """Raises InvalidRequest for a name that no token may carry, such as the name of a certificate's identity."""
    if not name or not name.isprintable() or len(name.encode()) > NAME_BYTES_MAX or name.startswith(CERTIFICATE):
        raise InvalidRequest(
            f"identity {name!r}: expected 1 to {NAME_BYTES_MAX} bytes of printable text that does not begin with "
            f"{CERTIFICATE!r}"
        )


def _claims(claims: dict[str, Any]) -> Claims:
    identity, token_id, issued_s, expires_s = (claims[name] for name in ("sub", "jti", "iat", "exp"))
    confirmation = claims.get("cnf", {})
    if not all(isinstance(each, str) and each for each in (identity, token_id)):
        raise _invalid("its subject and its id must be text")
    if identity.startswith(CERTIFICATE):
        raise _invalid(f"its subject begins with {CERTIFICATE!r}, which only a certificate proves")
    if not all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (issued_s, expires_s)):
        raise _invalid("its times must be numbers")
    # Python's JSON accepts NaN, which is never over a limit, and numbers that do not fit a float.
    if not all(abs(each) <= TIME_S_MAX for each in (issued_s, expires_s)):
        raise _invalid("its times make no sense")
    if expires_s - issued_s > TTL_S_MAX:
        raise _invalid(f"it lives over {TTL_S_MAX} s: expected a shorter life")
    # An unknown kind of binding must not pass as no binding.
    if not isinstance(confirmation, dict) or not confirmation.keys() <= {_BINDING}:
        raise _invalid("its binding is of an unknown kind")
    try:
        text = confirmation.get(_BINDING, "")
        thumbprint = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (ValueError, TypeError) as cause:
        raise _invalid("its binding is not a SHA-256") from cause
    if _BINDING in confirmation and len(thumbprint) != hashlib.sha256().digest_size:
        raise _invalid("its binding is not a SHA-256")
    return Claims(token_id, identity, float(issued_s), float(expires_s), thumbprint)


def _private_key(pem: bytes) -> Any:
    serialization, ed25519 = _library("serialization"), _library("asymmetric.ed25519")
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as cause:
        raise InvalidRequest("the token key is not a private key in PEM format without a password") from cause
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise InvalidRequest("the token key is of another kind: expected Ed25519 (kvstore token key)")
    return key


def _key_id(public_key: Any) -> str:
    serialization = _library("serialization")
    raw = public_key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return hashlib.sha256(raw).hexdigest()[:16]


def _invalid(why: str) -> NotKnown:
    return NotKnown(Reason.TOKEN_INVALID, f"the token is not valid: {why}; issue another one (kvstore token issue)")


def _library(name: str) -> Any:
    return _imported(f"cryptography.hazmat.primitives.{name}")


def _jwt() -> Any:
    return _imported("jwt")


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as missing:
        raise InvalidRequest("tokens need PyJWT and cryptography: pip install 'kvstore-llm[security]'") from missing
