"""Options that say how connections are secured, at both ends, as decorators that give one value each.

Separate from the other options, because servers, clients and what they start (peers, children) share them.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvstore.errors import InvalidRequest
from kvstore.security.audit import AuditLog
from kvstore.security.authenticator import Authenticator
from kvstore.security.networks import is_loopback
from kvstore.security.server import ServerSecurity
from kvstore.security.tls import ClientTls, ServerTls, server_certificate

if TYPE_CHECKING:
    from kvstore.client.credentials import Credentials

F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger(__name__)

PRIVATE_UMASK = 0o077


@dataclass(frozen=True, slots=True)
class ClientAccess:
    """How a client proves itself and knows workers; files are named, nothing of them is held. Can be pickled."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None
    token_file: str | None = None

    def tls(self) -> ClientTls | None:
        """The TLS files, if any."""
        if not (self.ca_file or self.cert_file or self.key_file or self.server_name):
            return None
        return ClientTls(self.ca_file, self.cert_file, self.key_file, self.server_name)


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """How a worker is secured; files are named."""

    cert_file: str | None = None
    key_file: str | None = None
    client_ca_file: str | None = None
    access_file: str | None = None
    audit_file: str | None = None
    insecure: bool = False
    private: bool | None = None
    peers: ClientAccess = ClientAccess()

    def check(self, addresses: Iterable[str]) -> None:
        """Raises InvalidRequest where an address that others reach would be served without TLS (rule X1)."""
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidRequest("--tls-cert and --tls-key go together: give both, or neither")
        if self.client_ca_file is not None and self.cert_file is None:
            raise InvalidRequest("--tls-client-ca asks clients for certificates, which takes TLS: give --tls-cert too")
        if self.peers.token_file is not None and self.cert_file is None:
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
                    f"{address} can be reached by others, and nothing is encrypted: give --tls-cert and --tls-key (and "
                    "--access, which says who may do what), or --insecure where the network itself is trusted"
                )

    def make_private(self, *, keeps_keys: bool) -> None:
        """From now on new files of this process and its children are this user's alone, where that is wanted."""
        if self.private if self.private is not None else bool(self.access_file or keeps_keys):
            os.umask(PRIVATE_UMASK)

    def open(self) -> ServerSecurity:
        """Reads the files and opens the audit log. Close ``audit``. Raises InvalidRequest."""
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
        return ServerSecurity(tls, self.client_ca_file is not None, authenticator, audit)

    def credentials(self) -> Credentials:
        """With which this worker calls others: its own certificate, and the token that it was given.

        Raises InvalidRequest where the files cannot be used: later nobody could be told.
        """
        from kvstore.client.credentials import PLAIN, Credentials

        peers = self.peers
        if self.cert_file is None:
            return PLAIN
        # Where workers and clients are signed by one authority, it need be named only once.
        ca_file = peers.ca_file or self.client_ca_file
        made = Credentials(ClientTls(ca_file, self.cert_file, self.key_file, peers.server_name), peers.token_file)
        assert made.version
        return made


def server_options(command: F) -> F:
    """TLS, access and audit of a worker; gives ``secured``, a ServerAccess."""

    @click.option(
        "--tls-cert", metavar="FILE", envvar="KVSTORE_TLS_CERT", help="PEM file of this worker's certificate."
    )
    @click.option("--tls-key", metavar="FILE", envvar="KVSTORE_TLS_KEY", help="PEM file of its key.")
    @click.option("--tls-client-ca", metavar="FILE", help="Authority of clients' certificates, which all then need.")
    @click.option("--tls-ca", metavar="FILE", envvar="KVSTORE_TLS_CA", help="Authority of other workers' certificates.")
    @click.option(
        "--tls-server-name",
        metavar="NAME",
        envvar="KVSTORE_TLS_SERVER_NAME",
        help="Name that other workers' certificates have, where it is not their address.",
    )
    @click.option("--token-file", metavar="FILE", envvar="KVSTORE_TOKEN_FILE", help="Token for calls to other workers.")
    @click.option(
        "--access", metavar="FILE", help="JSON file that says who may do what (kvstore/security/SECURITY.md)."
    )
    @click.option(
        "--audit-log", metavar="FILE", help="Where administrative acts and denials are written, as JSON lines."
    )
    @click.option(
        "--insecure", is_flag=True, help="Listen on a network without TLS: whoever reaches it may do anything."
    )
    @click.option(
        "--private/--no-private",
        default=None,
        help="New files on root and disk are this user's alone; by default with --access or --keys.",
    )
    @functools.wraps(command)
    def wrapped(
        *args: Any,
        tls_cert: str | None,
        tls_key: str | None,
        tls_client_ca: str | None,
        tls_ca: str | None,
        tls_server_name: str | None,
        token_file: str | None,
        access: str | None,
        audit_log: str | None,
        insecure: bool,
        private: bool | None,
        **kwargs: Any,
    ) -> Any:
        peers = ClientAccess(tls_ca, None, None, tls_server_name, token_file)
        secured = ServerAccess(tls_cert, tls_key, tls_client_ca, access, audit_log, insecure, private, peers)
        return command(*args, secured=secured, **kwargs)

    return wrapped  # type: ignore[return-value]


def server_arguments(secured: ServerAccess, number: int = 0) -> list[str]:
    """The arguments that give another program the same security; several write audit logs of their own."""
    audit = secured.audit_file if number == 0 or secured.audit_file is None else f"{secured.audit_file}-{number}"
    given = {
        "--tls-cert": secured.cert_file,
        "--tls-key": secured.key_file,
        "--tls-client-ca": secured.client_ca_file,
        "--tls-ca": secured.peers.ca_file,
        "--tls-server-name": secured.peers.server_name,
        "--token-file": secured.peers.token_file,
        "--access": secured.access_file,
        "--audit-log": audit,
    }
    arguments = [part for option, value in given.items() if value is not None for part in (option, value)]
    if secured.insecure:
        arguments.append("--insecure")
    if secured.private is not None:
        arguments.append("--private" if secured.private else "--no-private")
    return arguments


def client_options(command: F) -> F:
    """How a client proves itself; gives ``client``, a ClientAccess."""

    @click.option(
        "--tls-ca", metavar="FILE", envvar="KVSTORE_TLS_CA", help="Authority that signed workers' certificates."
    )
    @click.option(
        "--tls-cert", metavar="FILE", envvar="KVSTORE_TLS_CERT", help="PEM file of our certificate for workers."
    )
    @click.option("--tls-key", metavar="FILE", envvar="KVSTORE_TLS_KEY", help="PEM file of its key.")
    @click.option(
        "--tls-server-name",
        metavar="NAME",
        envvar="KVSTORE_TLS_SERVER_NAME",
        help="Name that workers' certificates have, where it is not their address.",
    )
    @click.option("--token-file", metavar="FILE", envvar="KVSTORE_TOKEN_FILE", help="File with our token for workers.")
    @functools.wraps(command)
    def wrapped(
        *args: Any,
        tls_ca: str | None,
        tls_cert: str | None,
        tls_key: str | None,
        tls_server_name: str | None,
        token_file: str | None,
        **kwargs: Any,
    ) -> Any:
        client = ClientAccess(tls_ca, tls_cert, tls_key, tls_server_name, token_file)
        return command(*args, client=client, **kwargs)

    return wrapped  # type: ignore[return-value]
