"""One worker with TLS, an access file and an audit log, and clients of it with any identity."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kvstore import ClientTls
from kvstore.client.limits import ClientLimits
from kvstore.engine.coordination import ClusterMember
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.security.audit import AuditLog
from kvstore.security.authentication import REVOKED, Authenticator, issue, new_key
from kvstore.security.guard import ServerSecurity
from kvstore.security.tls import Certificate
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.server import Worker
from tests.kit.certificates import Authority, Pair
from tests.kit.patience import stretched
from tests.kit.stores import member_on

HOUR_S = 3600.0


class Issuer:
    """Signs tokens; its public key is in ``folder``."""

    def __init__(self, folder: Path, name: str = "issuer") -> None:
        self.key, public = new_key()
        (folder / f"{name}.pub").write_bytes(public)

    def token(self, identity: str, id: str = "id", ttl_s: float = HOUR_S, bound: bytes = b"", ago_s: float = 0) -> str:
        return issue(self.key, identity, id, time.time() - ago_s, ttl_s, bound)


@dataclass
class Secured:
    """A worker that asks who calls."""

    worker: Worker
    member: ClusterMember
    folder: Path
    authority: Authority
    issuer: Issuer
    server: Pair
    audit: AuditLog
    root: MemoryRoot

    @property
    def address(self) -> str:
        return self.worker.address

    @property
    def counters(self) -> dict[str, int]:
        return self.worker.service.calls.counts.snapshot()

    @property
    def denied(self) -> int:
        return sum(count for name, count in self.counters.items() if name.startswith("denied_"))

    def set_access(self, **changed: Any) -> None:
        """Replaces the access file."""
        path = self.folder / "access.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))

    def revoke(self, *ids: str) -> None:
        (self.folder / REVOKED).write_text(json.dumps(dict.fromkeys(ids, time.time() + HOUR_S)))

    def audited_bytes(self) -> int:
        """Bytes in the audit log so far."""
        assert self.audit.flush(10.0)
        return (self.folder / "audit.log").stat().st_size

    def audited(self, from_bytes: int = 0) -> list[dict[str, Any]]:
        """The lines of the audit log after its first ``from_bytes``."""
        assert self.audit.flush(10.0)
        with open(self.folder / "audit.log", "rb") as file:
            file.seek(from_bytes)
            return [json.loads(line) for line in file]

    @contextmanager
    def channel(self, tls: ClientTls) -> Iterator[grpc.Channel]:
        """A plain client of another language: gRPC and the files."""
        cert, key = (Path(file).read_bytes() if file else None for file in (tls.cert_file, tls.key_file))
        assert tls.ca_file is not None
        credentials = grpc.ssl_channel_credentials(Path(tls.ca_file).read_bytes(), key, cert)
        with grpc.secure_channel(self.address, credentials) as channel:
            yield channel

    def token_file(self, token: str, name: str = "token") -> Path:
        path = self.folder / name
        path.touch(0o600)
        path.write_text(token + "\n")
        return path


SOON = stretched(
    ClientLimits(probe_s=2.0, match_s=2.0, pin_s=2.0, read_s=4.0, write_s=4.0),
    *("probe_s", "match_s", "pin_s", "read_s", "write_s"),
)
"""Limits of a client that is refused."""


@contextmanager
def secured(
    folder: Path,
    identities: Mapping[str, Mapping[str, str]],
    *,
    mutual: bool = True,
    quotas: Mapping[str, Mapping[str, float]] | None = None,
    limits: WorkerLimits | None = None,
    member: ClusterMember | None = None,
    listen: str = "127.0.0.1:0",
) -> Iterator[Secured]:
    """A worker on a root in memory, stopped at the end."""
    authority, issuer = Authority(folder / "tls"), Issuer(folder)
    server = authority.server()
    access = {"identities": identities, "token_keys": ["issuer.pub"], "quotas": quotas or {}}
    (folder / "access.json").write_text(json.dumps(access))
    certificate = Certificate(authority.ca if mutual else None, server.cert, server.key)
    audit = AuditLog(folder / "audit.log")
    security = ServerSecurity(certificate, mutual, Authenticator(folder / "access.json"), audit)
    root = MemoryRoot(MemoryFiles())
    member = member or member_on(root)
    worker = Worker(member, listen, limits, security=security)
    try:
        worker.start()
        yield Secured(worker, member, folder, authority, issuer, server, audit, root)
    finally:
        worker.stop()
        member.close()
        audit.close()


def bearer(token: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of a call with a token."""
    return (("authorization", f"Bearer {token}"),) if token is not None else ()
