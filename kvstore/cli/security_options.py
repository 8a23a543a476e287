"""Options for TLS, tokens, access files and tiers of servers."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.options import DURATION, SIZE, Size, flag, option
from kvstore.errors import InvalidRequest
from kvstore.node.settings import MEMORY_BYTES_MIN, SYNC_S_MAX, SYNC_S_MIN, TierSettings
from kvstore.security.audit import AuditLog
from kvstore.security.authentication import Account, Authenticator, account_secret
from kvstore.security.guard import ServerSecurity
from kvstore.security.tls import ClientTls, ServerTls, is_loopback, server_certificate
from kvstore.text import size
from kvstore.writes import WRITE_NAMES, WriteMode

if TYPE_CHECKING:
    from kvstore.client.bulk.links import Credentials


# Options that say how connections are secured, at both ends.


log = logging.getLogger(__name__)

PRIVATE_UMASK = 0o077


@dataclass(frozen=True, slots=True)
class ClientAccess:
    """A client's proof of identity, and its trust in workers. Holds names of files only. Can be pickled."""

    ca_file: str | None = option(
        "--tls-ca", metavar="FILE", envvar="KVSTORE_TLS_CA", help="Authority that signed workers' certificates."
    )
    cert_file: str | None = option(
        "--tls-cert", metavar="FILE", envvar="KVSTORE_TLS_CERT", help="PEM file of our certificate for workers."
    )
    key_file: str | None = option("--tls-key", metavar="FILE", envvar="KVSTORE_TLS_KEY", help="PEM file of its key.")
    server_name: str | None = option(
        "--tls-server-name",
        metavar="NAME",
        envvar="KVSTORE_TLS_SERVER_NAME",
        help="Name in workers' certificates, if it is not their address.",
    )
    token_file: str | None = option(
        "--token-file", metavar="FILE", envvar="KVSTORE_TOKEN_FILE", help="File with our token for workers."
    )

    def tls(self) -> ClientTls | None:
        """The TLS files, if any."""
        if not (self.ca_file or self.cert_file or self.key_file or self.server_name):
            return None
        return ClientTls(self.ca_file, self.cert_file, self.key_file, self.server_name)


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """The security of a worker: TLS, access and audit. Holds names of files, not their content."""

    cert_file: str | None = option(
        "--tls-cert", metavar="FILE", envvar="KVSTORE_TLS_CERT", help="PEM file of this worker's certificate."
    )
    key_file: str | None = option("--tls-key", metavar="FILE", envvar="KVSTORE_TLS_KEY", help="PEM file of its key.")
    client_ca_file: str | None = option(
        "--tls-client-ca", metavar="FILE", help="Authority of clients' certificates; all clients then need one."
    )
    ca_file: str | None = option(
        "--tls-ca", metavar="FILE", envvar="KVSTORE_TLS_CA", help="Authority of other workers' certificates."
    )
    server_name: str | None = option(
        "--tls-server-name",
        metavar="NAME",
        envvar="KVSTORE_TLS_SERVER_NAME",
        help="Name in other workers' certificates, if it is not their address.",
    )
    token_file: str | None = option(
        "--token-file", metavar="FILE", envvar="KVSTORE_TOKEN_FILE", help="Token for calls to other workers."
    )
    access_file: str | None = option(
        "--access", metavar="FILE", help="JSON file that says who may do what (kvstore/security/SECURITY.md)."
    )
    audit_file: str | None = option(
        "--audit-log", metavar="FILE", help="Where administrative calls and denials are logged, as JSON lines."
    )
    insecure: bool = flag("--insecure", help="Listen on a network without TLS: anybody who reaches it may do anything.")
    any_account: bool = flag(
        "--any-account",
        help="On loopback, serve every account of this host; by default only the one that the worker runs as.",
    )
    private: bool | None = option(
        "--private/--no-private",
        default=None,
        help="Only this user may read new files on root and disk; by default with --access or --keys.",
    )

    def check(self, addresses: Iterable[str]) -> None:
        """Raises InvalidRequest where an address that others reach would be served without TLS (rule X1)."""
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidRequest("--tls-cert and --tls-key go together: give both, or neither")
        if self.client_ca_file is not None and self.cert_file is None:
            raise InvalidRequest("--tls-client-ca asks clients for certificates, which takes TLS: give --tls-cert too")
        if self.token_file is not None and self.cert_file is None:
            raise InvalidRequest(
                "--token-file would go to other workers in the clear: give --tls-cert and --tls-key too"
            )
        if self.cert_file is not None:
            return
        for address in addresses:
            if is_loopback(address):
                continue
            if self.insecure:
                log.warning("%s is served without TLS: anybody who reaches it can read and write", address)
            else:
                raise InvalidRequest(
                    f"{address} can be reached by others, and nothing is encrypted: give --tls-cert and "
                    "--tls-key (and --access, which says who may do what), or --insecure if the network "
                    "itself is trusted"
                )

    def make_private(self, *, keeps_keys: bool) -> None:
        """Makes new files of this process and its children readable by this user alone, if that is wanted."""
        if self.private if self.private is not None else bool(self.access_file or keeps_keys):
            os.umask(PRIVATE_UMASK)

    def open(self, listen: str) -> ServerSecurity:
        """Reads the files, opens the audit log of a worker at ``listen``. Close ``audit``. Raises InvalidRequest."""
        tls = None
        if self.cert_file is not None and self.key_file is not None:
            tls = server_certificate(ServerTls(self.cert_file, self.key_file, self.client_ca_file))
            assert tls.version
        authenticator = None
        if self.access_file is not None:
            authenticator = Authenticator(self.access_file)
            authenticator.load()
        audit = AuditLog(self.audit_file)
        audit.open()
        account = None
        if self.client_ca_file is None and authenticator is None and is_loopback(listen):
            account = self._account()
        return ServerSecurity(tls, self.client_ca_file is not None, authenticator, audit, account)

    def _account(self) -> Account | None:
        if self.any_account:
            log.warning("worker.any_account every account of this host can read and write through this worker")
            return None
        try:
            return Account(account_secret())
        except InvalidRequest as cause:
            raise InvalidRequest(
                f"{cause}: the worker cannot tell its account's clients from others; give --any-account to serve every "
                "account of this host"
            ) from cause

    def as_client(self) -> ClientAccess:
        """The access of this worker to others: its own certificate, and the token that it was given."""
        if self.cert_file is None:
            return ClientAccess(server_name=self.server_name, token_file=self.token_file)
        # Where one authority signs workers and clients, it need be named only once.
        ca_file = self.ca_file or self.client_ca_file
        return ClientAccess(ca_file, self.cert_file, self.key_file, self.server_name, self.token_file)

    def credentials(self) -> Credentials:
        """Returns the credentials for calls to other workers.

        Raises InvalidRequest if the files cannot be used: at the first call nobody could be told.
        """
        from kvstore.client.bulk.links import PLAIN, Credentials

        if self.cert_file is None:
            return PLAIN
        client = self.as_client()
        made = Credentials(client.tls(), client.token_file)
        assert made.version
        return made

    def of_worker(self, number: int) -> ServerAccess:
        """Returns the security of one of several workers on a host: each writes a separate audit log."""
        if number == 0 or self.audit_file is None:
            return self
        return replace(self, audit_file=f"{self.audit_file}-{number}")


# Options that say what a worker has above its root: ``--memory``, ``--disk``, ``--write`` and what goes along.


class FolderSize(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """``FOLDER:SIZE``, such as ``/nvme/kv:200GiB``."""

    name = "folder:size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        folder, colon, size = str(value).rpartition(":")
        if not colon or not folder:
            self.fail(f"{value!r} is not a local disk: write FOLDER:SIZE, such as /nvme/kv:200GiB", param, ctx)
        return folder, Size().convert(size, param, ctx)


@dataclass(frozen=True, slots=True)
class Tiers:
    """The memory and the local disk of a worker."""

    memory: int = option(
        "--memory",
        type=SIZE,
        default=0,
        help="Shared memory of each worker for hot chunks, such as 8GiB; engines on this host map it. By default none.",
    )
    disk: tuple[str, int] | None = option(
        "--disk",
        type=FolderSize(),
        help="Local disk tier, such as /nvme/kv:200GiB, for chunks that memory evicts after more than one use. "
        "Workers must not share the folder; kvstore up makes one in it, of that size, for each of its "
        "workers.",
    )
    write: str = option(
        "--write",
        type=click.Choice(WRITE_NAMES),
        default=WriteMode.BEHIND.value,
        show_default=True,
        help="With --memory, when a put is acknowledged: behind, once memory has it (a killed worker loses what "
        "is not on the root yet); through, once the root has it. --durability everysec "
        "and fsync always wait for the root.",
    )
    sync_interval_s: float = option(
        "--sync-interval",
        type=DURATION,
        default="1s",
        show_default=True,
        help="Shortest interval at which a worker tells its peers what its memory holds.",
    )

    def settings(self) -> TierSettings:
        """The node's settings. Raises InvalidRequest, which names the options."""
        if 0 < self.memory < MEMORY_BYTES_MIN:
            raise InvalidRequest(f"--memory {size(self.memory)}: expected 0, or at least {size(MEMORY_BYTES_MIN)}")
        if self.disk is not None and not self.memory:
            raise InvalidRequest("--disk without --memory: chunks of a local disk are read through memory; give both")
        if not SYNC_S_MIN <= self.sync_interval_s <= SYNC_S_MAX:
            raise InvalidRequest(
                f"--sync-interval is {self.sync_interval_s:g} s: expected {SYNC_S_MIN:g} s to {SYNC_S_MAX:g} s"
            )
        return TierSettings.of(self.memory, self.disk, self.write, self.sync_interval_s)

    def of_worker(self, number: int) -> Tiers:
        """Returns the tiers of one of several workers on a host, each with its own folder on the local disk."""
        if self.disk is None:
            return self
        folder, size_bytes = self.disk
        return replace(self, disk=(str(Path(folder, f"worker-{number}")), size_bytes))
