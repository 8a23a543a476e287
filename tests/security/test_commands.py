"""The commands: open networks are refused, a secured host serves its clients, tokens are made and revoked."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.errors import InvalidRequest, PermissionDenied
from tests.cli.conftest import Run, eventually, parsed, serving
from tests.cli.conftest import run as run
from tests.kit.cases import for_each
from tests.kit.certificates import Authority

LAYOUT = kvstore.Layout(layers=2, kv_heads=2, head_dim=32, dtype="float16", chunk_tokens=16)
TOKENS = np.arange(100 * LAYOUT.chunk_tokens)


@for_each(
    "arguments, said",
    [
        (("--listen", "0.0.0.0:0"), "--insecure"),
        (("--listen", "[::]:0"), "--insecure"),
        (("--listen", "10.1.2.3:7070"), "--insecure"),
        (("--listen", "127.0.0.1:0", "--metrics", "0.0.0.0:0"), "0.0.0.0:0 can be reached by others"),
        (("--listen", "127.0.0.1:0", "--tls-cert", "x.pem"), "go together"),
        (("--listen", "127.0.0.1:0", "--tls-client-ca", "x.pem"), "give --tls-cert"),
        (("--listen", "127.0.0.1:0", "--tls-cert", "no.pem", "--tls-key", "no.key"), "cannot read the TLS"),
        (("--listen", "127.0.0.1:0", "--access", "no.json"), "cannot read the access file"),
        (("--listen", "127.0.0.1:0", "--audit-log", "/no/audit.log"), "cannot write the audit log"),
    ],
)
def test_open_or_misconfigured_worker_does_not_start(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    result = run("worker", "--root", str(tmp_path), "--etcd", "127.0.0.1:1", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    if "--insecure" in said:
        assert said in run("up", "--root", str(tmp_path), *arguments).stderr


def test_token_is_not_sent_in_the_clear(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("x.y.z")
    with pytest.raises(InvalidRequest, match="in the clear"):
        kvstore.connect("10.1.2.3:7070", token_file=file)
    file.chmod(0o644)
    with pytest.raises(InvalidRequest, match="others can read it"):
        kvstore.connect("127.0.0.1:7070", token_file=file)


ANOTHER = "0123456789abcdef01234567"


def test_tokens_are_made_and_revoked_by_commands(run: Run, tmp_path: Path) -> None:
    key, token, access = tmp_path / "issuer.key", tmp_path / "a.token", tmp_path / "access.json"
    access.write_text(json.dumps({"token_keys": ["issuer.key.pub"]}))
    assert run("token", "key", str(key)).exit_code == 0
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert "exists" in run("token", "key", str(key)).stderr
    issued = run("token", "issue", "--key", str(key), "--identity", "alice", "--ttl", "2h", "--out", str(token))
    assert issued.exit_code == 0 and token.read_text().strip() not in issued.stdout
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert run("token", "issue", "--key", str(key), "--identity", "alice", "--ttl", "8d").exit_code == 2
    said = parsed(run("token", "revoke", "--access", str(access), "--token-file", str(token), ANOTHER, "--json"))
    assert ANOTHER in said["revoked"] and said["listed"] == 2
    for wrong in ("", "zz", ANOTHER.upper(), f"{ANOTHER}0"):
        result = run("token", "revoke", "--access", str(access), wrong)
        assert result.exit_code == 2 and "is no ID of a token" in result.stderr
    assert len(json.loads((tmp_path / "revoked.json").read_text())) == 2
    assert run("token", "revoke", "--access", str(access)).exit_code == 2


@pytest.mark.slow
def test_workers_of_another_account_can_read_what_is_revoked(run: Run, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        assert run("token", "revoke", "--access", str(tmp_path / "access.json"), "0" * 24).exit_code == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "revoked.json").stat().st_mode) == 0o644


def test_secured_host_from_the_commands_alone(run: Run, tmp_root: Path) -> None:
    """Two workers with memory, mutual TLS, tokens: clients are served, peers read each other, files are private."""
    folder = tmp_root / "secrets"
    authority = Authority(folder)
    worker, ops, engine = authority.server("worker"), authority.client("ops"), authority.client("engine")
    assert run("token", "key", str(folder / "issuer.key")).exit_code == 0
    token = folder / "alice.token"
    issue = ("token", "issue", "--key", str(folder / "issuer.key"), "--identity", "alice", "--out", str(token))
    assert run(*issue, "--bind", str(engine.cert_file)).exit_code == 0
    identities = {"cert:worker": {"*": "read"}, "cert:ops": {"*": "admin"}, "alice": {"acme": "write"}}
    (folder / "access.json").write_text(json.dumps({"identities": identities, "token_keys": ["issuer.key.pub"]}))
    root, audit = tmp_root / "root", tmp_root / "audit.log"
    at = ("--root", str(root), "--listen", "127.0.0.1:0", "--workers", "2", "--memory", "32MiB")
    tls = ("--tls-cert", str(worker.cert), "--tls-key", str(worker.key), "--tls-client-ca", str(authority.ca))
    more = ("--access", str(folder / "access.json"), "--audit-log", str(audit))
    with serving(tmp_root, "up", *at, *tls, *more) as running:
        first, second = running.grpc.split(",")
        with (
            kvstore.connect(first, tls=engine, token_file=token) as one,
            kvstore.connect(second, tls=engine, token_file=token) as two,
            kvstore.connect(second, tls=ops) as steering,
        ):
            cache, other = (store.namespace("m", LAYOUT, tenant="acme") for store in (one, two))
            kv = np.random.default_rng(3).standard_normal(LAYOUT.shape(len(TOKENS)), np.float32).astype(np.float16)
            assert cache.put(TOKENS, kv).tokens_present == len(TOKENS)
            eventually(lambda: steering.stats()["peers_prints"] >= 100, "the peer has heard of the chunks")
            count, got = other.get(TOKENS)
            assert count == len(TOKENS) and np.array_equal(got, kv)
            assert steering.stats()["peers_hits"] >= 100  # over TLS, as cert:worker
            assert "peers_hits" not in two.stats()
            with pytest.raises(PermissionDenied):
                other.clear()
            steering.namespace("m", LAYOUT, tenant="acme").clear()
        secured = ("--tls-ca", str(ops.ca_file), "--tls-cert", str(ops.cert_file), "--tls-key", str(ops.key_file))
        assert parsed(run("stats", "--connect", first, *secured, "--json"))["workers"] == 1
        assert run("stats", "--connect", first).exit_code == 2
        assert running.end() == 0
    lines = [json.loads(line) for file in (audit, tmp_root / "audit.log-1") for line in file.read_text().splitlines()]
    assert {("denied", "alice", "Clear"), ("act", "cert:ops", "Clear")} <= {
        (line["event"], line["identity"], line["method"]) for line in lines if "method" in line
    }
    assert token.read_text().strip() not in audit.read_text()
    modes = {stat.S_IMODE(each.lstat().st_mode) & 0o077 for each in [root, *root.rglob("*"), audit]}
    assert modes == {0}
