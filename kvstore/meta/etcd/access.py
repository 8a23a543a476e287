"""Access to etcd: its endpoints, TLS files and user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.brief import brief, kind_of
from kvstore.checks import is_unicode
from kvstore.errors import InvalidRequest
from kvstore.security.secret_files import read_secret

ENDPOINTS_MAX = 64
PEM_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class EtcdTls:
    """PEM files for TLS. Without ``ca_file`` the system's roots count; ``cert_file`` and ``key_file`` go together.

    ``server_name`` is the name expected in the server's certificate if it differs from the endpoint's host.
    """

    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidRequest("etcd TLS: a client certificate and its key go together: give both files or neither")


@dataclass(frozen=True, slots=True)
class EtcdUser:
    """A user of etcd's own authentication."""

    name: str
    password: str = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not is_unicode(self.name):
            raise InvalidRequest(f"etcd user name={brief(self.name)}: expected text")
        if not isinstance(self.password, str) or not is_unicode(self.password):
            # Say nothing of the value: it may be the password, as bytes.
            raise InvalidRequest(f"etcd user password is {kind_of(self.password)}: expected text, in Unicode")
        if not self.name:
            raise InvalidRequest("etcd user name is empty: give a name, or no user at all")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """``host:port`` of each member, in the order given; ``tls`` as their scheme says, None if they have none."""

    targets: tuple[str, ...]
    tls: bool | None

    @classmethod
    def parse(cls, text: str | Sequence[str]) -> Endpoints:
        """Parses ``host:port[,host:port]`` or a sequence of them, with or without http:// or https://.

        Raises InvalidRequest for an empty list, a missing or wrong port, a path, or http and https mixed.
        """
        given = [text] if isinstance(text, str) else text
        if not all(isinstance(one, str) and is_unicode(one) for one in given):
            raise InvalidRequest(f"etcd={brief(text)}: expected host:port, several with commas or as a list")
        parts = [part.strip() for one in given for part in one.split(",") if part.strip()]
        if not 1 <= len(parts) <= ENDPOINTS_MAX:
            raise InvalidRequest(
                f"{len(parts)} etcd endpoints: expected 1 to {ENDPOINTS_MAX}, as host:port[,host:port]"
            )
        schemes = {part.split("://", 1)[0].lower() if "://" in part else "" for part in parts}
        if not schemes <= {"", "http", "https"}:
            raise InvalidRequest(f"etcd endpoints {text!r}: expected host:port, http://host:port or https://host:port")
        if len(schemes) > 1:
            raise InvalidRequest(f"etcd endpoints {text!r} mix schemes: write all of them alike")
        tls = {"": None, "http": False, "https": True}[schemes.pop()]
        return cls(tuple(dict.fromkeys(_target(part) for part in parts)), tls)

    def __str__(self) -> str:
        return ",".join(self.targets)


def check_access(etcd: object, tls: object, user: object) -> None:
    """Raises InvalidRequest for ``etcd``, ``etcd_tls`` or ``etcd_user`` of a wrong type, or the two without etcd."""
    listed = [etcd] if etcd is None or isinstance(etcd, str) else etcd
    if not isinstance(listed, list | tuple) or not all(isinstance(one, str | None) for one in listed):
        raise InvalidRequest(f"etcd={brief(etcd)}: expected host:port, several with commas or as a list")
    if etcd is not None and not any(listed):
        raise InvalidRequest(f"etcd={brief(etcd)} names none: give host:port, or None for a store without etcd")
    for name, given, kind in (("etcd_tls", tls, EtcdTls), ("etcd_user", user, EtcdUser)):
        if given is not None and not isinstance(given, kind):
            # Only its type: it may be a password.
            raise InvalidRequest(f"{name} is {kind_of(given)}: expected kvstore.{kind.__name__}")
        if given is not None and not etcd:
            raise InvalidRequest(f"{name} says how to reach etcd, and none is given: give etcd=host:port as well")


def _target(part: str) -> str:
    address = part.split("://", 1)[-1].rstrip("/")
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    odd = any(character in host for character in "/@?# ") or (":" in host and not bracketed)
    if not colon or not host or odd or not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65535:
        raise InvalidRequest(f"etcd endpoint {part!r}: expected host:port, such as 10.0.0.5:2379 or [::1]:2379")
    return f"{host}:{int(port)}"


def read_pem(what: str, path: str | Path | None) -> bytes | None:
    """Returns the content of a PEM file. Raises InvalidRequest, naming file and reason, if it cannot be read."""
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            content = file.read(PEM_BYTES_MAX)
    except OSError as cause:
        raise InvalidRequest(f"etcd TLS: cannot read the {what} {str(path)!r}: {cause.strerror}") from cause
    if b"-----BEGIN" not in content:
        raise InvalidRequest(f"etcd TLS: the {what} {str(path)!r} is not in PEM format")
    return content


def read_key(path: str | Path | None) -> bytes | None:
    """Returns the content of a key's PEM file, which nobody else may read. Raises InvalidRequest."""
    if path is None:
        return None
    content = read_secret(path, "etcd TLS client key", PEM_BYTES_MAX)
    if b"-----BEGIN" not in content:
        raise InvalidRequest(f"etcd TLS: the client key {str(path)!r} is not in PEM format")
    return content
