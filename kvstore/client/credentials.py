"""A client's credentials: TLS files and a token file, reloaded when they change."""

from __future__ import annotations

import logging
import socket
import ssl
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import Any

import grpc

from kvstore.channels import open_channel
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.security.authentication import HEADER, TOKEN_BYTES_MAX, account_secret, proof
from kvstore.security.tls import Certificate, ClientTls, Watched, client_certificate, is_loopback, read_secret
from kvstore.text import kind_of
from kvstore.tracing import Metadata
from kvstore.wire.bulk.channel import LinkBroken, LinkLate
from kvstore.wire.credentials import channel_credentials

log = logging.getLogger(__name__)


class Credentials:
    """The credentials of one client, for all its connections. Thread-safe.

    Without ``tls`` and ``token_file`` connections are plain.
    """

    def __init__(self, tls: ClientTls | None = None, token_file: str | Path | None = None) -> None:
        if tls is not None and not isinstance(tls, ClientTls):
            raise InvalidRequest(f"tls is {kind_of(tls)}: expected kvstore.ClientTls")
        if token_file is not None and not isinstance(token_file, str | PathLike):
            # Only its type: it may be a token.
            raise InvalidRequest(f"token_file is {kind_of(token_file)}: expected the path of a file")
        self._tls = tls
        self._certificate: Certificate | None = client_certificate(tls) if tls is not None else None
        self._token_file = token_file
        self._watched = Watched([token_file] if token_file is not None else [])
        self._lock = Lock()
        self._metadata: Metadata = ()
        self._token_version = 0

    def check(self, address: str) -> None:
        """Raises InvalidRequest if a file is wrong, or if a token would cross the network in the clear."""
        if self._token_file is not None and self._certificate is None and not is_loopback(address):
            raise InvalidRequest(
                f"a token for {address} would go over the network in the clear: give TLS files too "
                "(tls=, --tls-ca FILE)"
            )
        assert self.version >= 0

    @property
    def version(self) -> int:
        """Grows when anything has changed. Raises InvalidRequest if the files were never good."""
        self._read_token()
        return (self._certificate.version if self._certificate is not None else 0) + self._token_version

    @property
    def connection_version(self) -> int:
        """Grows when connections must be made again: after a new certificate, not after a new token."""
        return self._certificate.version if self._certificate is not None else 0

    @property
    def metadata(self) -> Metadata:
        """Returns the token as the metadata of a call."""
        if self._token_file is not None:
            self._read_token()
        return self._metadata

    def account(self, address: str) -> Metadata:
        """Returns the proof of our account for a worker of this host; nothing if the account has no secret."""
        if not is_loopback(address):
            return ()
        try:
            return ((HEADER, proof(account_secret(), address)),)
        except InvalidRequest as error:
            log.debug("client.no_account %s", error)  # a worker that asks for it says what to do
            return ()

    def channel(self, address: str, options: list[tuple[str, Any]]) -> grpc.Channel:
        """Returns a channel to a worker; it connects at first use. Raises InvalidRequest."""
        if self._certificate is None:
            return open_channel(address, lambda: grpc.insecure_channel(address, options=options))
        name = self._name(address)
        if name is not None:
            options = [*options, ("grpc.ssl_target_name_override", name)]
        credentials = channel_credentials(self._certificate)
        return open_channel(address, lambda: grpc.secure_channel(address, credentials, options=options))

    def wrapped(self, sock: socket.socket, address: str) -> socket.socket:
        """Wraps the socket of a bulk connection in TLS within its time-out; returns it as it is if calls are plain.

        Raises LinkLate or LinkBroken if the worker is silent or goes away meanwhile, Unavailable for anything else.
        """
        if self._certificate is None:
            return sock
        host = self._name(address) or address.rpartition(":")[0].removeprefix("[").removesuffix("]")
        try:
            return self._certificate.context(server=False).wrap_socket(sock, server_hostname=host)
        except OSError as cause:  # includes SSLError
            sock.close()
            kind: type[Unavailable] = Unavailable
            if isinstance(cause, TimeoutError):
                kind = LinkLate
            elif isinstance(cause, (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)):
                kind = LinkBroken
            raise kind(f"the TLS handshake with the bulk port of {address} failed: {cause}") from cause

    def _name(self, address: str) -> str | None:
        """Returns the name expected in the worker's certificate, if it is not the host."""
        if self._tls is not None and self._tls.server_name is not None:
            return self._tls.server_name
        return "localhost" if address.startswith("unix:") else None

    def _read_token(self) -> None:
        file = self._token_file
        # Asked in any case, so that changes count from before the first read on.
        if file is None or (not self._watched.changed() and self._metadata):
            return
        with self._lock:
            try:
                token = read_secret(file, "token file", TOKEN_BYTES_MAX).decode("ascii").strip()
            except UnicodeDecodeError as cause:
                raise InvalidRequest(f"the token file {str(file)!r} holds no token") from cause
            except KVStoreError:
                if self._metadata:
                    return  # perhaps it is just being replaced: keep the last token while it is valid
                raise
            if not token or not token.isprintable() or " " in token:
                raise InvalidRequest(f"the token file {str(file)!r} holds no token: one line, as token issue writes it")
            metadata = (("authorization", f"Bearer {token}"),)
            if metadata != self._metadata:
                self._metadata = metadata
                self._token_version += 1


PLAIN = Credentials()
"""Credentials of a client that proves nothing."""
