"""TLS: the files, their present content, and contexts for sockets of our own.

Certificates are read again when their files change. A wrong change is logged, and the old ones stay (rule X2).
"""

from __future__ import annotations

import ipaddress
import logging
import os
import ssl
import stat
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvstore.errors import InvalidRequest, KVStoreError

# Addresses as text, ``host:port``, and which of them only this host can reach.


def is_loopback(address: str) -> bool:
    """True if only this host can reach ``host:port`` or ``unix:path``."""
    if address.startswith("unix:"):
        return True
    return names_loopback(address.rpartition(":")[0])


def names_loopback(host: str) -> bool:
    """True if a host, an IPv6 address in brackets, is this one."""
    host = host.removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # also 127.0.0.1.example.org, a name that may resolve to any host


def joined(host: str, port: int) -> str:
    """Returns the ``host:port`` of a host without brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# Files that hold secrets: who else may read them, and whether they have changed.


FILE_BYTES_MAX = 1 << 20
LOOK_S = 1.0
"""Shortest time between two looks whether a file has changed."""


def read_secret(path: str | Path, what: str, bytes_max: int = FILE_BYTES_MAX) -> bytes:
    """Returns the content of a file that other users cannot read. Raises InvalidRequest, which never has the content.

    The rule is PostgreSQL's: a file of ours gives no rights to group and others; a file of root's may be readable by
    its group, as Kubernetes and systemd hand secrets to processes that are not root.
    """
    return _read(path, what, bytes_max, stat.S_IRWXG | stat.S_IRWXO)


def read_trusted(path: str | Path, what: str, bytes_max: int = FILE_BYTES_MAX) -> bytes:
    """Returns the content of a file that other users may read but not change: certificates, access files.

    Raises InvalidRequest.
    """
    return _read(path, what, bytes_max, stat.S_IWGRP | stat.S_IWOTH)


class WatchedFiles:
    """Some files, and whether any of them has changed since the last question. Thread-safe; follows links."""

    def __init__(self, paths: Iterable[str | Path], look_s: float = LOOK_S) -> None:
        self._paths = tuple(map(str, paths))
        self._look_s = look_s
        self._lock = threading.Lock()  # guards the stats of the last look
        self._seen: tuple[tuple[int, ...], ...] | None = None
        self._look_at_s = 0.0

    def changed(self) -> bool:
        """True if a file changed since the last call; False on the first call. Looks at most once a second."""
        now_s = time.monotonic()
        with self._lock:
            if now_s < self._look_at_s:
                return False
            self._look_at_s = now_s + self._look_s
            seen, self._seen = self._seen, tuple(map(_state, self._paths))
            return seen is not None and seen != self._seen


def _read(path: str | Path, what: str, bytes_max: int, forbidden: int) -> bytes:
    """Reads a file of ours or of root's whose mode has none of the ``forbidden`` rights."""
    try:
        # Check the open file: a moment later the path may name another file.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidRequest(f"the {what} {str(path)!r} is not a regular file")
            _check_access(path, what, status, forbidden)
            with open(fd, "rb", closefd=False) as file:
                content = file.read(bytes_max + 1)
        finally:
            os.close(fd)
    except InvalidRequest:
        raise
    except OSError as cause:
        raise InvalidRequest(f"cannot read the {what} {str(path)!r}: {cause.strerror or cause}") from cause
    except ValueError as cause:  # a NUL, or half a character
        raise InvalidRequest(f"cannot read the {what} {str(path)!r}: this is no path") from cause
    if len(content) > bytes_max:
        raise InvalidRequest(f"the {what} {str(path)!r} is over {bytes_max} bytes")
    return content


def _check_access(path: str | Path, what: str, status: os.stat_result, forbidden: int) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise InvalidRequest(
            f"the {what} {str(path)!r} belongs to user {status.st_uid}: expected user {os.geteuid()}, or root"
        )
    if status.st_uid == 0:
        forbidden &= ~stat.S_IRGRP
    if status.st_mode & forbidden:
        can, remedy = ("read", "chmod 600") if forbidden & stat.S_IROTH else ("change", "chmod go-w")
        raise InvalidRequest(
            f"the {what} {str(path)!r} has mode {stat.S_IMODE(status.st_mode):04o}, so that others can {can} it: "
            f"{remedy} {path}"
        )


def _state(path: str) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # a NUL, or half a character, is said by who reads it
        return ()
    # The last is for chmod and chown, by which a refused file is put right.
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files of a client. Without ``ca_file`` the system's authorities count.

    ``cert_file`` and ``key_file`` go together, and prove the client's identity. ``server_name`` is the name expected in
    the server's certificate, if that is not the host of its address.
    """

    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidRequest("TLS: a certificate and its key go together: give both files, or neither")


@dataclass(frozen=True, slots=True, repr=False)
class Pems:
    """The content of the files; the key is a secret and not shown."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None


class Certificate:
    """The files of one end, read again when they change. Thread-safe; reads nothing before it is asked.

    ``ca_file`` of a client signs servers. That of a server signs clients, which all need a certificate then.
    """

    def __init__(self, ca_file: str | Path | None, cert_file: str | Path | None, key_file: str | Path | None) -> None:
        self._files = (ca_file, cert_file, key_file)
        self._watched = WatchedFiles([file for file in self._files if file is not None])
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

    def expires_in_s(self) -> float | None:
        """Returns the time until the certificate expires; None without one, or without a parser."""
        cert = self.pems.cert
        try:
            from cryptography import x509
        except ModuleNotFoundError:
            return None
        if cert is None:
            return None
        ends = min(each.not_valid_after_utc for each in x509.load_pem_x509_certificates(cert))
        return (ends - datetime.now(UTC)).total_seconds()

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


def client_certificate(tls: ClientTls) -> Certificate:
    """Returns a client's certificate."""
    return Certificate(tls.ca_file, tls.cert_file, tls.key_file)


def _context(files: tuple[str | Path | None, ...], pems: Pems, server: bool) -> ssl.SSLContext:
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
        shown = ", ".join(repr(str(file)) for file in files if file is not None)
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
