"""TLS: the files, their present content, and contexts for sockets of our own. gRPC uses them through kvstore/wire.

Certificates are read again when their files change. A wrong change is logged, and the old ones stay (rule X2).
"""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.security.secret_files import Watched, read_secret, read_trusted

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files of a worker. With ``client_ca_file`` every client needs a certificate that it signed (mutual TLS)."""

    cert_file: str
    key_file: str
    client_ca_file: str | None = None


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files of a client. Without ``ca_file`` the system's authorities count.

    ``cert_file`` and ``key_file`` go together, and prove the client's identity. ``server_name`` is the name expected in
    the worker's certificate, if that is not the host of its address.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidRequest("TLS: a certificate and its key go together: give both files, or neither")


@dataclass(frozen=True, slots=True)
class Pems:
    """The content of the files; the key is a secret and not shown."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None

    def __repr__(self) -> str:
        return "Pems(...)"


class Certificate:
    """The files of one end, read again when they change. Thread-safe; reads nothing before it is asked."""

    def __init__(self, ca_file: str | None, cert_file: str | None, key_file: str | None) -> None:
        self._files = (ca_file, cert_file, key_file)
        self._watched = Watched([file for file in self._files if file is not None])
        self._lock = threading.Lock()  # guards the certificate and its contexts
        self._pems: Pems | None = None
        self._version = 0
        self._contexts: dict[bool, tuple[int, ssl.SSLContext]] = {}

    @property
    def version(self) -> int:
        """A number that grows when the files have changed. Raises InvalidRequest if they were never good."""
        if self._pems is None or self._watched.changed():
            with self._lock:
                self._renew()
        return self._version

    @property
    def pems(self) -> Pems:
        """The content of the files. Raises InvalidRequest if they were never good."""
        assert self.version
        assert self._pems is not None
        return self._pems

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Returns a context for sockets of our own, TLS 1.3. A server with an authority asks for certificates."""
        version, pems = self.version, self.pems
        with self._lock:
            known = self._contexts.get(server)
            if known is not None and known[0] == version:
                return known[1]
            made = _context(self._files, pems, server)
            self._contexts[server] = (version, made)
            return made

    def expires_s(self) -> float | None:
        """Returns when the certificate expires, in seconds since the epoch; None without one, or without a parser."""
        cert = self.pems.cert
        try:
            from cryptography import x509
        except ModuleNotFoundError:
            return None
        if cert is None:
            return None
        return min(each.not_valid_after_utc.timestamp() for each in x509.load_pem_x509_certificates(cert))

    def expires_in_s(self) -> float | None:
        """Returns the seconds until the certificate expires; under 0 once it has."""
        ends_s = self.expires_s()
        return None if ends_s is None else ends_s - datetime.now(UTC).timestamp()

    def _renew(self) -> None:
        before = self._pems
        if before is None:
            self._watched.changed()  # before reading: later changes are then seen
        try:
            pems = self._read()
            _context(self._files, pems, server=False)  # checks that certificate and key fit
        except KVStoreError as error:
            if before is None:
                raise
            log.error("certificate.not_reloaded the previous one stays in use: %s", error)
            return
        if pems != before:
            self._pems = pems
            self._version += 1
            if before is not None:
                log.warning("certificate.reloaded file=%s", self._files[1] or self._files[0])

    def _read(self) -> Pems:
        ca_file, cert_file, key_file = self._files
        return Pems(
            _pem(read_trusted(ca_file, "TLS authority"), ca_file) if ca_file else None,
            _pem(read_trusted(cert_file, "TLS certificate"), cert_file) if cert_file else None,
            _pem(read_secret(key_file, "TLS key"), key_file) if key_file else None,
        )


def server_certificate(tls: ServerTls) -> Certificate:
    """Returns a worker's certificate. Its authority is the one that signs clients."""
    return Certificate(tls.client_ca_file, tls.cert_file, tls.key_file)


def client_certificate(tls: ClientTls) -> Certificate:
    """Returns a client's certificate."""
    return Certificate(tls.ca_file, tls.cert_file, tls.key_file)


def _context(files: tuple[str | None, ...], pems: Pems, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _, cert_file, key_file = files
    try:
        if pems.ca is not None:
            context.load_verify_locations(cadata=pems.ca.decode("ascii"))
        elif not server:
            context.load_default_certs()
        if cert_file is not None and key_file is not None:
            context.load_cert_chain(cert_file, key_file)
    except (OSError, ValueError) as cause:
        shown = ", ".join(repr(file) for file in files if file is not None)
        raise InvalidRequest(
            f"the TLS files {shown} cannot be used: {cause} (a key that does not fit its certificate?)"
        ) from cause
    if server:
        context.num_tickets = 0  # only frames may come on a bulk connection, even between requests
        if pems.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
    return context


def _pem(content: bytes, path: str | Path) -> bytes:
    if b"-----BEGIN" not in content:
        raise InvalidRequest(f"TLS: {str(path)!r} is not in PEM format")
    return content
