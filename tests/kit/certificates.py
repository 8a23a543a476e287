"""Certificates for tests: an authority in a folder, and the certificates that it signs."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvstore import ClientTls

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates; ``ca`` is its own."""

    def __init__(self, folder: Path, name: str = "test authority") -> None:
        self._folder = folder
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca = folder / "ca.pem"
        folder.mkdir(parents=True, exist_ok=True)
        self.ca.write_bytes(self._signed(self._name, self._key, DAY, (), is_ca=True))

    def server(self, name: str = "server", lives: datetime.timedelta = DAY) -> Pair:
        """For 127.0.0.1 and localhost."""
        names = (x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost"))
        return self.issue(name, *names, lives=lives)

    def issue(self, name: str, *names: x509.GeneralName, lives: datetime.timedelta = DAY) -> Pair:
        """With ``name`` as its common name, and ``names`` as alternative ones."""
        key = ec.generate_private_key(ec.SECP256R1())
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        pair.cert.write_bytes(self._signed(_name(name), key, lives, names))
        pair.key.touch(0o600)
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair

    def client(self, name: str | None = None, *uris: str) -> ClientTls:
        """Returns a client's files: with a certificate if it has a name."""
        if name is None:
            return ClientTls(str(self.ca))
        pair = self.issue(name, *(x509.UniformResourceIdentifier(uri) for uri in uris))
        return ClientTls(str(self.ca), str(pair.cert), str(pair.key))

    def _signed(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        lives: datetime.timedelta,
        names: tuple[x509.GeneralName, ...],
        is_ca: bool = False,
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + lives)
            .add_extension(x509.BasicConstraints(is_ca, None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
