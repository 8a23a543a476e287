"""Identifies callers by an access file that is read again when it changes.

A wrong new file changes nothing: the old rules stay, and the failure is counted and logged (rule X6).
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.parsing import parse_json
from kvstore.security.bearer import SKEW_S, Claims, PublicKey, verified
from kvstore.security.denials import Denied, NotKnown, Reason
from kvstore.security.identity import CERTIFICATE, Identity, Presented
from kvstore.security.rules import Rules
from kvstore.security.secret_files import LOOK_S, Watched, read_trusted

log = logging.getLogger(__name__)

REVOKED = "revoked.json"
"""The file beside the access file with the ids of revoked tokens, each with the time at which it would have expired."""
ACCESS_BYTES_MAX = 16 << 20
TOKENS_MAX = 4096
"""Limit on tokens whose signature is remembered as right."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The content of all files at one time."""

    rules: Rules
    keys: dict[str, PublicKey]
    revoked: frozenset[str]
    watched: Watched
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
                Reason.UNAUTHENTICATED,
                "the call has neither a token nor a client certificate with a name: give one (--token-file, or "
                "--tls-cert and --tls-key)",
            )
        for name in names:
            if name in loaded.rules.identities:
                return Identity(name, loaded.rules.identities[name])
        raise Denied(
            Reason.UNKNOWN_IDENTITY,
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

    def _refused(self, claims: Claims, presented: Presented, loaded: _Loaded) -> tuple[Reason, str] | None:
        """The reason why a token with a right signature does not count now, and what to do; None if it counts."""
        now_s = self._now_s()
        if claims.issued_s - SKEW_S > now_s:
            # Its life is limited from then on, so it would count for longer than any token may.
            said = "the token is issued in the future: compare the clocks of its issuer and of this worker"
            return Reason.TOKEN_INVALID, said
        if claims.expires_s + SKEW_S <= now_s:
            return Reason.TOKEN_EXPIRED, "the token has expired: issue another one (kvstore token issue)"
        if claims.id in loaded.revoked:
            return Reason.TOKEN_REVOKED, "the token was revoked: issue another one (kvstore token issue)"
        if claims.thumbprint and not hmac.compare_digest(claims.thumbprint, presented.thumbprint):
            return Reason.TOKEN_BINDING, "the token is bound to a client certificate, which did not come with it"
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
        watched = Watched([self.path, revoked, *files])
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
