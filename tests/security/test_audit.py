"""The audit log: each denial names the identity that was claimed, and never what was shown to prove it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.security.access import Denied, NotKnown, Presented
from kvstore.security.audit import AuditLog
from kvstore.security.authentication import REVOKED, Authenticator, issue, new_key
from kvstore.security.guard import AccessGuard
from tests.kit.cases import for_each

KEY, PUBLIC = new_key()
NOW_S, HOUR_S = 1_700_000_000.0, 3600.0


def token(identity: str, id: str = "1", now_s: float = NOW_S, key: bytes = KEY) -> str:
    return issue(key, identity, id, now_s, HOUR_S)


@for_each(
    "presented, outcome, identity",
    [
        (Presented(token=token("mallory")), "unknown_identity", "mallory"),
        (Presented(names=("mallory",)), "unknown_identity", "cert:mallory"),
        (Presented(token=token("alice", "gone")), "token_revoked", "alice"),
        (Presented(token=token("alice", now_s=NOW_S - 2 * HOUR_S)), "token_expired", "alice"),
        (Presented(token=token("alice", now_s=NOW_S + HOUR_S)), "token_invalid", "alice"),
        # Nobody knows who signed it: what it says is no claim of anybody.
        (Presented(token=token("alice", key=new_key()[0])), "token_invalid", None),
        (Presented(), "unauthenticated", None),
    ],
)
def test_denial_names_the_claimed_identity(
    presented: Presented, outcome: str, identity: str | None, tmp_path: Path
) -> None:
    (tmp_path / "issuer.pub").write_bytes(PUBLIC)
    (tmp_path / REVOKED).write_text('{"gone": 1700003600}')
    access = tmp_path / "access.json"
    access.write_text('{"identities": {"alice": {"*": "read"}}, "token_keys": ["issuer.pub"]}')
    lines: list[dict[str, object]] = []
    audit = AuditLog(None)

    def keep(event: str, **fields: object) -> None:
        lines.append({"event": event, **fields})

    audit.write = keep  # type: ignore[method-assign]
    guard = AccessGuard(lambda counter: None, Authenticator(access, now_s=lambda: NOW_S), audit)
    with pytest.raises((NotKnown, Denied)):
        guard.admit("Match", presented)
    (line,) = lines
    assert (line["event"], line["outcome"], line["identity"]) == ("denied", outcome, identity)
    assert presented.token is None or presented.token not in str(line)
