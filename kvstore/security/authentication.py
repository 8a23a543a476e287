"""Who a caller is: certificates, bearer tokens, and the account of a process on this host."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import os
import pwd
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from kvstore.core.validate import parse_json
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.security.access import (
    ACCOUNT,
    CERTIFICATE,
    NAME_BYTES_MAX,
    DenialReason,
    Denied,
    Identity,
    NotKnown,
    Presented,
    Rules,
)
from kvstore.security.tls import LOOK_S, WatchedFiles, read_secret, read_trusted

# The account that a worker on loopback runs as: its clients prove that they run as it too (rule X12).
#
# Every account of a host can connect to a loopback port, and neither TCP nor gRPC reveals the account of the other end.
# So workers and clients of one account share a secret in a file that only this account can read. A client sends a proof
# derived from the secret and the port that it calls: another program that listens there instead of the worker learns
# nothing that other workers accept.


HEADER = "kvstore-account"
"""The metadata of a call that has the proof."""
SECRET_BYTES = 32


class Account:
    """The account of this worker. Without ``secret`` only its clients can connect: to a unix socket of mode 0600."""

    def __init__(self, secret: bytes | None) -> None:
        try:
            user = pwd.getpwuid(os.geteuid()).pw_name
        except KeyError:
            user = str(os.geteuid())
        self.name = ACCOUNT + user
        """The name of its clients."""
        self._secret = secret
        self._proof = secrets.token_bytes()

    def serve(self, address: str) -> None:
        """Sets the address by which clients call the worker."""
        if self._secret is not None:
            self._proof = proof(self._secret, address).encode()

    def is_proved_by(self, shown: str) -> bool:
        """True if a client that shows this runs as the same account."""
        return self._secret is None or hmac.compare_digest(shown.encode(errors="replace"), self._proof)


def proof(secret: bytes, address: str) -> str:
    """Returns the proof that a client of ``host:port`` sends. A host has several names: only the port counts."""
    return hmac.new(secret, address.rpartition(":")[2].encode(), sha256).hexdigest()


def account_secret() -> bytes:
    """Returns the secret of the account that this process runs as, and makes it at first. Raises InvalidRequest."""
    path = _home() / ".local/state/kvstore/account.secret"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with NamedTemporaryFile("w", dir=path.parent) as file, suppress(FileExistsError):  # of mode 0600
                file.write(secrets.token_hex(SECRET_BYTES))
                file.flush()
                # A link, not a rename: if several processes make the secret concurrently, all must use the first one.
                os.link(file.name, path)
    except OSError as cause:
        raise InvalidRequest(f"cannot write {path}: {cause.strerror or cause}") from cause
    content = read_secret(path, "secret of this account", 2 * SECRET_BYTES)
    with suppress(ValueError):
        secret = bytes.fromhex(content.decode())
        if (
            len(secret) == SECRET_BYTES
        ):  # a shorter one could be guessed, and an empty one after a power cut is no secret
            return secret
    raise InvalidRequest(f"{path} holds no secret of this account: remove it, and start the workers again")


def _home() -> Path:
    """The account's home as the system knows it: a worker and its clients may have different environments."""
    try:
        return Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError as cause:
        raise InvalidRequest(f"uid {os.geteuid()} has no entry in the system's list of accounts, so no home") from cause


# Bearer tokens: signed with Ed25519, expiring, with an id that can be revoked, and bound to a certificate if wanted.
#
# They are JSON web tokens (RFC 7519), bound by RFC 8705 section 3.1. Workers have public keys only, so a compromised
# worker cannot issue tokens. Needs the ``security`` extra.


ALGORITHM = "EdDSA"
ISSUER = AUDIENCE = "kvstore"
TTL_S_MAX = 7 * 86_400
"""A token that lives longer is refused, even with a valid signature: a stolen token must expire."""
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
    token: str = _imported("jwt").encode(claims, key, ALGORITHM, headers={"kid": _key_id(key.public_key())})
    return token


def verified(token: str, keys: dict[str, PublicKey]) -> Claims:
    """Verifies a token's signature and returns its claims. Raises NotKnown (TOKEN_INVALID).

    The caller checks whether the token has expired or was revoked.
    """
    jwt = _imported("jwt")
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
        raise _invalid("its times are out of range")
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
    return NotKnown(
        DenialReason.TOKEN_INVALID, f"the token is not valid: {why}; issue another one (kvstore token issue)"
    )


def _library(name: str) -> Any:
    return _imported(f"cryptography.hazmat.primitives.{name}")


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as missing:
        raise InvalidRequest("tokens need PyJWT and cryptography: pip install 'kvstore-llm[security]'") from missing


# Identifies callers by an access file that is read again when it changes.
#
# A wrong new file changes nothing: the old rules stay, and the failure is counted and logged (rule X6).


log = logging.getLogger(__name__)

REVOKED = "revoked.json"
"""The file next to the access file with the ids of revoked tokens, each with the time at which it would have expired.
"""
ACCESS_BYTES_MAX = 16 << 20
TOKENS_MAX = 4096
"""Limit on tokens whose signature is remembered as right."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The content of all files at one time."""

    rules: Rules
    keys: dict[str, PublicKey]
    revoked: frozenset[str]
    watched: WatchedFiles
    seen: OrderedDict[str, Claims] = field(default_factory=OrderedDict)


class Authenticator:
    """Identifies callers. Thread-safe; reads nothing before ``load``, or the first question.

    ``on_reload`` may be set; it is called for each reload with True if the new files were good.
    """

    def __init__(
        self,
        access: str | Path,
        *,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(access)
        self._now_s = now_s
        self.on_reload: Callable[[bool], None] = lambda good: None
        self._lock = threading.Lock()  # guards the rules, and the recently verified tokens
        self._loaded: _Loaded | None = None
        self._trouble = ""
        self._again_at_s = 0.0

    def load(self) -> None:
        """Reads the files for the first time. Raises InvalidRequest."""
        with self._lock:
            self._loaded = self._loaded or self._read()

    @property
    def rules(self) -> Rules:
        """The rules in force. Raises InvalidRequest if no files were ever good."""
        return self._current().rules

    def identify(self, presented: Presented) -> Identity:
        """Returns the identity of a caller. Raises NotKnown (an Unauthenticated) or Denied (a PermissionDenied), with a
        reason.

        A token takes precedence over a certificate: it names the caller more exactly, perhaps through a proxy that has
        a certificate.
        """
        loaded = self._current()
        if presented.token is not None:
            names: tuple[str, ...] = (self._of_token(presented, loaded),)
        else:
            names = tuple(CERTIFICATE + name for name in presented.names)
        if not names:
            raise NotKnown(
                DenialReason.UNAUTHENTICATED,
                "the call has neither a token nor a client certificate with a name: give one (--token-file, or "
                "--tls-cert and --tls-key)",
            )
        for name in names:
            if name in loaded.rules.identities:
                return Identity(name, loaded.rules.identities[name])
        raise Denied(
            DenialReason.UNKNOWN_IDENTITY,
            f"identity {names[0]!r} is not in the access file: ask the operator to add it",
            names[0],
        )

    def _of_token(self, presented: Presented, loaded: _Loaded) -> str:
        token = presented.token
        assert token is not None
        claims = loaded.seen.get(token)
        if claims is None:
            claims = verified(token, loaded.keys)
            with self._lock:
                loaded.seen[token] = claims
                while len(loaded.seen) > TOKENS_MAX:
                    loaded.seen.popitem(last=False)
        if (refused := self._refused(claims, presented, loaded)) is not None:
            raise NotKnown(*refused, claims.identity)
        return claims.identity

    def _refused(self, claims: Claims, presented: Presented, loaded: _Loaded) -> tuple[DenialReason, str] | None:
        """The reason why a token with a right signature does not count now, and what to do; None if it counts."""
        now_s = self._now_s()
        if claims.issued_s - SKEW_S > now_s:
            # Its life is limited from then on, so it would count for longer than any token may.
            said = "the token is issued in the future: compare the clocks of its issuer and of this worker"
            return DenialReason.TOKEN_INVALID, said
        if claims.expires_s + SKEW_S <= now_s:
            return DenialReason.TOKEN_EXPIRED, "the token has expired: issue another one (kvstore token issue)"
        if claims.id in loaded.revoked:
            return DenialReason.TOKEN_REVOKED, "the token was revoked: issue another one (kvstore token issue)"
        if claims.thumbprint and not hmac.compare_digest(claims.thumbprint, presented.thumbprint):
            return DenialReason.TOKEN_BINDING, "the token is bound to a client certificate, which did not come with it"
        return None

    def _current(self) -> _Loaded:
        loaded = self._loaded
        if loaded is None:
            self.load()
            loaded = self._loaded
            assert loaded is not None
        is_due = bool(self._trouble) and time.monotonic() >= self._again_at_s
        return self._reloaded(loaded) if loaded.watched.changed() or is_due else loaded

    def _reloaded(self, loaded: _Loaded) -> _Loaded:
        """Returns the present content of the files, or ``loaded`` if they are wrong.

        Wrong files are read again soon: a missing one may come under a path that is not watched yet.
        """
        with self._lock:
            before, self._again_at_s = self._trouble, time.monotonic() + LOOK_S
            try:
                self._loaded = loaded = self._read()
                self._trouble = ""
            except KVStoreError as error:
                self._trouble = str(error)
        if self._trouble and self._trouble != before:
            log.error("access.not_reloaded the previous rules stay in force: %s", self._trouble)
            self.on_reload(False)
        elif not self._trouble:
            log.warning("access.reloaded identities=%d", len(loaded.rules.identities))
            self.on_reload(True)
        return loaded

    def _read(self) -> _Loaded:
        folder = self.path.parent
        revoked = folder / REVOKED
        rules = Rules.parse(read_trusted(self.path, "access file", ACCESS_BYTES_MAX))
        files = [folder / name for name in rules.token_keys]
        watched = WatchedFiles([self.path, revoked, *files])
        watched.changed()
        # Parse again, now that the watched files are known: a later change is then seen.
        rules = Rules.parse(read_trusted(self.path, "access file", ACCESS_BYTES_MAX))
        keys = [PublicKey.of_pem(read_trusted(file, "token key"), str(file)) for file in files]
        return _Loaded(rules, {key.id: key for key in keys}, frozenset(read_revoked(revoked)), watched)


def read_revoked(path: Path) -> dict[str, float]:
    """Returns the ids of revoked tokens, and when each would have expired; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        found = parse_json(read_trusted(path, "list of revoked tokens", ACCESS_BYTES_MAX))
    except ValueError as cause:
        if isinstance(cause, InvalidRequest):
            raise
        raise InvalidRequest(f"the list of revoked tokens {str(path)!r} is not JSON: {cause}") from cause
    if not isinstance(found, dict) or not all(isinstance(each, (int, float)) for each in found.values()):
        raise InvalidRequest(f"the list of revoked tokens {str(path)!r}: expected an object of ids and times")
    return {str(name): float(expires_s) for name, expires_s in found.items()}
