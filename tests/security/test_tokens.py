"""The validity of a token: until it expires, unless it was revoked, with the certificate that it is bound to."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from kvstore.security.access import NOTHING, NotKnown, Presented, Reason
from kvstore.security.authentication import REVOKED, SKEW_S, Authenticator, PublicKey, issue, new_key, verified

KEY, PUBLIC = new_key()
NOW_S = 1_700_000_000.0
MINUTE_S, HOUR_S = 60.0, 3600.0


class Known:
    """An authenticator with a clock that a test sets, and one identity."""

    def __init__(self, folder: Path, revoked: tuple[str, ...] = ()) -> None:
        (folder / "issuer.pub").write_bytes(PUBLIC)
        (folder / REVOKED).write_text(json.dumps(dict.fromkeys(revoked, NOW_S + HOUR_S)))
        access = {"identities": {"a": {"*": "read"}, "cert:a": {"*": "read"}}, "token_keys": ["issuer.pub"]}
        (folder / "access.json").write_text(json.dumps(access))
        self.now_s = NOW_S
        self._authenticator = Authenticator(folder / "access.json", now_s=lambda: self.now_s)

    def refused(self, presented: Presented) -> Reason | None:
        """Why somebody is not known; None where somebody is."""
        try:
            self._authenticator.identify(presented)
        except NotKnown as error:
            return error.reason
        return None


def token(id: str = "1", ttl_s: float = HOUR_S, thumbprint: bytes = b"") -> str:
    return issue(KEY, "a", id, NOW_S, ttl_s, thumbprint)


def test_who_shows_nothing_is_not_known(tmp_path: Path) -> None:
    known = Known(tmp_path)
    assert known.refused(NOTHING) is Reason.UNAUTHENTICATED
    assert known.refused(Presented(names=("a",))) is None


def test_a_token_ends_when_it_says(tmp_path: Path) -> None:
    known, shown = Known(tmp_path), Presented(token=token(ttl_s=HOUR_S))
    assert known.refused(shown) is None
    known.now_s += HOUR_S + 5 * MINUTE_S
    assert known.refused(shown) is Reason.TOKEN_EXPIRED, "also one that was seen before"


def test_a_revoked_token_is_none(tmp_path: Path) -> None:
    known = Known(tmp_path, revoked=("2",))
    assert known.refused(Presented(token=token("1"))) is None
    assert known.refused(Presented(token=token("2"))) is Reason.TOKEN_REVOKED


def test_a_bound_token_needs_its_certificate(tmp_path: Path) -> None:
    known, ours = Known(tmp_path), hashlib.sha256(b"ours").digest()
    bound = token(thumbprint=ours)
    assert known.refused(Presented(token=bound, thumbprint=ours)) is None
    for thumbprint in (b"", hashlib.sha256(b"theirs").digest()):
        assert known.refused(Presented(token=bound, thumbprint=thumbprint)) is Reason.TOKEN_BINDING


def test_a_token_that_is_issued_in_the_future_is_none(tmp_path: Path) -> None:
    known = Known(tmp_path)
    for ahead_s, reason in (
        (SKEW_S, None),
        (SKEW_S + 1, Reason.TOKEN_INVALID),
        (7 * 24 * HOUR_S, Reason.TOKEN_INVALID),
    ):
        shown = Presented(token=issue(KEY, "a", "1", NOW_S + ahead_s, HOUR_S))
        assert known.refused(shown) is reason, ahead_s
    known.now_s += MINUTE_S
    assert known.refused(Presented(token=issue(KEY, "a", "1", NOW_S + SKEW_S + 1, HOUR_S))) is None


def test_a_token_signed_with_another_key_is_none(tmp_path: Path) -> None:
    """It says that it was signed with ours."""
    ours, theirs = (issue(key, "a", "1", NOW_S, HOUR_S).split(".") for key in (KEY, new_key()[0]))
    forged = ".".join([*ours[:2], theirs[2]])
    assert Known(tmp_path).refused(Presented(token=forged)) is Reason.TOKEN_INVALID


def test_a_token_over_the_limit_is_not_looked_at() -> None:
    with pytest.raises(NotKnown, match="expected at most"):
        verified("x" * 100_000, {each.id: each for each in [PublicKey.of_pem(PUBLIC, "here")]})
