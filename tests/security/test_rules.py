"""The access file, tokens, secrets' files, quotas and the audit log, each by itself."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jwt
import numpy as np
import pytest

from kvstore.core.clock import SystemClock
from kvstore.core.metrics import WorkerCount
from kvstore.core.namespace import Namespace
from kvstore.engine.gc_state import ChunkHold
from kvstore.errors import InvalidRequest, Overloaded, PermissionDenied, Unauthenticated
from kvstore.format.keyset import ChunkKeys
from kvstore.security import authentication
from kvstore.security.access import (
    EVERY,
    DenialReason,
    Denied,
    Identity,
    Meters,
    NotKnown,
    OverQuota,
    Presented,
    Role,
    Rules,
    TenantQuota,
)
from kvstore.security.audit import AuditLog
from kvstore.security.authentication import REVOKED, SKEW_S, Authenticator, PublicKey, issue, new_key, verified
from kvstore.security.guard import AccessGuard
from kvstore.security.tls import WatchedFiles, read_secret, read_trusted
from kvstore.transport.status import Busy
from kvstore.worker.context import BytesInFlight, ClientHolds
from tests.kit.cases import for_each
from tests.kit.stores import SMALL

WRONG = {
    "not JSON": b"{",
    "no object": b"[]",
    "a misspelt part": b'{"identites": {}}',
    "a role that is none": b'{"identities": {"a": {"t": "root"}}}',
    "a role in capitals": b'{"identities": {"a": {"t": "READ"}}}',
    "roles that are a list": b'{"identities": {"a": ["read"]}}',
    "no name": b'{"identities": {"": {"t": "read"}}}',
    "a name with a line break": b'{"identities": {"a\\n": {"t": "read"}}}',
    "a name twice": b'{"identities": {"a": {"*": "read"}, "a": {"*": "admin"}}}',
    "a misspelt quota": b'{"quotas": {"t": {"request_per_s": 1}}}',
    "a negative quota": b'{"quotas": {"t": {"requests_per_s": -1}}}',
    "a quota that is text": b'{"quotas": {"t": {"pins_max": "1"}}}',
    "keys that are no list": b'{"token_keys": "issuer.pub"}',
}


@for_each("name", WRONG)
def test_wrong_access_file_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        Rules.parse(WRONG[name])


def test_roles_include_those_before() -> None:
    identity = Identity("a", {"acme": Role.WRITE, EVERY: Role.READ})
    assert identity.may(Role.READ, "other") and not identity.may(Role.WRITE, "other")
    assert identity.may(Role.WRITE, "acme") and not identity.may(Role.ADMIN, "acme")
    assert identity.may(Role.READ, EVERY) and not identity.may(Role.WRITE, EVERY)
    assert not Identity("b", {"acme": Role.ADMIN}).may(Role.READ, EVERY)


KEY, PUBLIC = new_key()
KEYS = {each.id: each for each in [PublicKey.of_pem(PUBLIC, "here")]}


def forged(algorithm: str = "EdDSA", key: Any = None, headers: dict[str, str] | None = None, **changed: Any) -> str:
    """Returns a token of a rogue issuer; ``None`` leaves a claim out."""
    now_s = int(time.time())
    claims = {"iss": "kvstore", "aud": "kvstore", "sub": "a", "jti": "1", "iat": now_s, "exp": now_s + 60, **changed}
    said = {name: value for name, value in claims.items() if value is not None}
    return jwt.encode(said, key or KEY, algorithm, headers=headers or {"kid": next(iter(KEYS))})


FORGED: dict[str, Callable[[], str]] = {
    "garbage": lambda: "x.y.z",
    "empty": lambda: "",
    "not signed": lambda: jwt.encode({"sub": "a"}, None, "none"),  # type: ignore[arg-type]
    "signed with a secret": lambda: jwt.encode({"sub": "a"}, "0" * 64, "HS256", headers={"kid": next(iter(KEYS))}),
    "of another key": lambda: forged(key=new_key()[0]),
    "of a key that is not known": lambda: forged(headers={"kid": "0"}),
    "of another issuer": lambda: forged(iss="somebody"),
    "for another audience": lambda: forged(aud="somebody"),
    "without an end": lambda: forged(exp=None),
    "without an id": lambda: forged(jti=None),
    "with a number for a subject": lambda: forged(sub="", jti="1"),
    "for longer than allowed": lambda: forged(exp=int(time.time()) + 8 * 86_400),
    "until never": lambda: forged(exp=float("nan")),
    "for ever": lambda: forged(iat=float("inf"), exp=float("inf")),
    "until what no float holds": lambda: forged(iat=10**400, exp=10**400),
    "for a certificate's identity": lambda: forged(sub="cert:ops"),
    "bound to what nobody understands": lambda: forged(cnf={"jkt": "x"}),
    "bound to no digest": lambda: forged(cnf={"x5t#S256": "abc"}),
    "very long": lambda: forged(more="x" * 5000),
}


@for_each("name", FORGED)
def test_forged_token_is_not_valid(name: str) -> None:
    with pytest.raises(NotKnown) as raised:
        verified(FORGED[name](), KEYS)
    assert raised.value.reason is DenialReason.TOKEN_INVALID


def test_token_counts_between_its_times_and_a_minute_around(tmp_path: Path) -> None:
    (tmp_path / "issuer.pub").write_bytes(PUBLIC)
    (tmp_path / "access.json").write_text('{"identities": {"a": {"*": "read"}}, "token_keys": ["issuer.pub"]}')
    now_s = issued_s = 1_700_000_000.0
    authenticator = Authenticator(tmp_path / "access.json", now_s=lambda: now_s)
    shown = Presented(token=issue(KEY, "a", "1", issued_s, 3600.0))
    for after_s, reason in (
        (-SKEW_S - 1, DenialReason.TOKEN_INVALID),
        (-SKEW_S, None),
        (3600.0 + SKEW_S - 1, None),
        (3600.0 + SKEW_S, DenialReason.TOKEN_EXPIRED),  # also one that was verified before
    ):
        now_s = issued_s + after_s
        try:
            assert authenticator.identify(shown).name == "a" and reason is None
        except NotKnown as refused:
            assert refused.reason is reason


def test_guard_denies_unknown_methods_and_lets_all_in_if_open(tmp_path: Path) -> None:
    (tmp_path / "access.json").write_text('{"identities": {"cert:ops": {"*": "admin"}}}')
    guard = AccessGuard(lambda name: None, Authenticator(tmp_path / "access.json"))
    guard.admit("Clear", Presented(names=("ops",))).allow("any tenant")
    with pytest.raises(PermissionDenied):
        guard.admit("Format", Presented(names=("ops",)))
    counted: list[WorkerCount] = []
    visit = AccessGuard(counted.append).admit("Clear", Presented())
    visit.allow("any tenant")
    visit.allow_every()
    visit.end("OK")
    assert (visit.identity.name, counted) == ("anyone", [])


def test_token_has_identity_end_and_binding() -> None:
    claims = verified(issue(KEY, "alice", "7", 1000.0, 60.0, bytes(range(32))), KEYS)
    assert (claims.identity, claims.id, claims.expires_s, claims.thumbprint) == ("alice", "7", 1060.0, bytes(range(32)))
    for identity, ttl_s in (("cert:a", 60.0), ("", 60.0), ("a", 8 * 86_400.0), ("a", 0.0)):
        with pytest.raises(InvalidRequest):
            issue(KEY, identity, "7", 1000.0, ttl_s)
    assert authentication.TTL_S_MAX == 7 * 86_400


@for_each("mode, good", [(0o600, True), (0o400, True), (0o644, False), (0o660, False), (0o604, False)])
def test_secret_that_others_can_read_is_refused(tmp_path: Path, mode: int, good: bool) -> None:
    path = tmp_path / "secret"
    path.write_text("very secret")
    path.chmod(mode)
    if good:
        assert read_secret(path, "key") == b"very secret"
        return
    with pytest.raises(InvalidRequest) as raised:
        read_secret(path, "key")
    assert "very secret" not in str(raised.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others")
def test_only_root_may_share_a_secret_with_a_group(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("x")
    path.chmod(0o440)
    assert read_secret(path, "key") == b"x"
    os.chown(path, 12_345, 12_345)
    path.chmod(0o400)
    for read in (read_secret, read_trusted):
        with pytest.raises(InvalidRequest, match="belongs to user 12345"):
            read(path, "key")


def test_file_that_others_can_change_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "access.json"
    path.write_text("{}")
    path.chmod(0o644)
    assert read_trusted(path, "access file") == b"{}"
    path.chmod(0o664)
    with pytest.raises(InvalidRequest, match="others can change it"):
        read_trusted(path, "access file")
    with pytest.raises(InvalidRequest, match="not a regular file"):
        read_trusted(tmp_path, "access file")


def test_change_is_seen_through_kubernetes_links(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "key").write_text(name)
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "key").symlink_to("..data/key")
    watched = WatchedFiles([tmp_path / "key"], look_s=0)
    assert not watched.changed() and not watched.changed()
    (tmp_path / "new").symlink_to("two")
    (tmp_path / "new").rename(tmp_path / "..data")
    assert watched.changed() and not watched.changed()


class Time:
    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def quota_that_refuses(meters: Meters, quotas: dict[str, TenantQuota], tenant: str = "t") -> str | None:
    try:
        meters.begin(tenant, quotas)
    except OverQuota as error:
        return error.quota
    return None


def test_requests_come_back_with_time() -> None:
    now = Time()
    meters, quotas = Meters(now), {"t": TenantQuota(requests_per_s=2)}
    assert [quota_that_refuses(meters, quotas) for _ in range(3)] == [None, None, "requests"]
    assert quota_that_refuses(meters, quotas, "another") is None
    now.s += 0.5
    assert [quota_that_refuses(meters, quotas) for _ in range(2)] == [None, "requests"]


def test_bytes_beyond_the_quota_are_a_debt() -> None:
    now = Time()
    meters, quotas = Meters(now), {EVERY: TenantQuota(bytes_in_per_s=100, bytes_out_per_s=1000)}
    meter = meters.begin("t", quotas)
    meters.moved(meter, bytes_in=400)
    assert quota_that_refuses(meters, quotas) == "bytes"
    now.s += 2.9
    assert quota_that_refuses(meters, quotas) == "bytes"
    now.s += 0.2
    assert quota_that_refuses(meters, quotas) is None
    usage = meters.usage()["t"]
    assert usage is not None and (usage.calls, usage.bytes_in, usage.calls_in_flight) == (2, 400, 2)


def test_concurrent_calls_are_bounded() -> None:
    meters, quotas = Meters(Time()), {"t": TenantQuota(calls_max=2)}
    first = meters.begin("t", quotas)
    meters.begin("t", quotas)
    assert quota_that_refuses(meters, quotas) == "calls"
    assert quota_that_refuses(meters, {"t": TenantQuota(calls_max=3)}) is None
    assert quota_that_refuses(meters, {"t": TenantQuota(calls_max=3)}) == "calls"
    meters.end(first)
    assert quota_that_refuses(meters, {"t": TenantQuota(calls_max=3)}) is None


def test_one_tenant_leaves_half_of_the_memory_to_others() -> None:
    in_flight = BytesInFlight(100)
    with ExitStack() as reserved:
        reserved.enter_context(in_flight.reserved(1000, "acme"))  # alone among its own: a large chunk must be reachable
        with pytest.raises(Busy, match="of tenant 'acme'"), in_flight.reserved(1, "acme"):
            pass
        reserved.enter_context(in_flight.reserved(30, "globex"))
        with pytest.raises(Busy, match="of tenant 'globex'"), in_flight.reserved(30, "globex"):
            pass
        assert in_flight.count == 80
        with pytest.raises(Busy), in_flight.reserved(30):
            pass
    assert in_flight.count == 0
    with in_flight.reserved(1000):
        assert in_flight.count == 1000


def test_one_tenant_leaves_half_of_the_holds_to_others() -> None:
    released: list[ChunkHold] = []
    holds = ClientHolds(4, 1 << 20, released.append, lambda hold: True, SystemClock(), limits_tenants=True)

    def hold(number: int, tenant: str) -> ChunkHold:
        chain = ChunkKeys.of(Namespace.of("m", SMALL, tenant=tenant), np.arange(SMALL.chunk_tokens, dtype=np.uint32))
        return ChunkHold(bytes([number]), chain, 1, time.monotonic() + 60, None)

    holds.add(hold(1, "acme"))
    holds.add(hold(2, "acme"))
    with pytest.raises(Overloaded):
        holds.add(hold(3, "acme"))
    assert [each.id for each in released] == [b"\3"]
    holds.add(hold(4, "globex"))
    assert holds.release(b"\1")
    holds.add(hold(5, "acme"))


def test_audit_log_rotates_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    log = AuditLog(path, bytes_max=400, kept_max=2)
    for number in range(20):
        log.write("denied", number=number, text="x" * 2000, nothing=None)
    log.write("act", odd="a\nb\u2028c")
    assert log.flush(10.0)
    log.close()
    lines = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
    assert lines[-1]["odd"] == "a\nb\u2028c"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["audit.log", "audit.log.1", "audit.log.2"]
    assert all(each.stat().st_mode & 0o777 == 0o600 for each in tmp_path.iterdir())
    older = json.loads((tmp_path / "audit.log.1").read_text().splitlines()[0])
    assert len(older["text"]) == 512 and "nothing" not in older


def test_unwritable_audit_log_is_counted(tmp_path: Path) -> None:
    lost: list[int] = []
    with pytest.raises(InvalidRequest, match="audit log"):
        AuditLog(tmp_path / "folder" / "audit.log")
    (tmp_path / "folder").mkdir()
    log = AuditLog(tmp_path / "folder" / "audit.log", bytes_max=1)
    log.on_lost = lambda: lost.append(1)
    (tmp_path / "folder" / "audit.log").unlink()
    (tmp_path / "folder").rmdir()
    log.write("one")
    log.write("two")
    assert log.flush(10.0)
    log.close()
    assert lost


def test_messages_of_denials_hold_no_token() -> None:
    token = forged(aud="somebody")
    with pytest.raises(Unauthenticated) as raised:
        verified(token, KEYS)
    assert token not in str(raised.value) and "somebody" not in repr(Presented(token=token)) + str(raised.value)
    assert token not in repr(Presented(token=token))


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
