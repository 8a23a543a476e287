"""The cluster's certificates, made by the openssl command: one authority, one certificate for each of its machines.

A machine shows the same one as a server (etcd, worker), as a member to other members, and as a client.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
DAYS = "2"


@dataclass(frozen=True, slots=True)
class Papers:
    """PEM files of one machine."""

    ca: Path
    cert: Path
    key: Path


class Authority:
    """Signs certificates. Its files, and theirs, are in ``folder``, which only root can read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def found(self) -> None:
        """Makes the authority itself."""
        self._folder.mkdir(mode=0o700, parents=True)
        self._openssl(
            "req",
            "-x509",
            *CURVE,
            "-days",
            DAYS,
            "-subj",
            "/CN=cluster authority",
            "-keyout",
            "ca.key",
            "-out",
            "ca.crt",
        )

    def issue(self, name: str, *addresses: str) -> Papers:
        """A certificate for ``name`` at these IP addresses."""
        names = ",".join((f"DNS:{name}", "IP:127.0.0.1", *(f"IP:{each}" for each in addresses)))
        (self._folder / f"{name}.ext").write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n")
        self._openssl("req", *CURVE, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        self._openssl(
            "x509",
            "-req",
            "-in",
            f"{name}.csr",
            "-CA",
            "ca.crt",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-days",
            DAYS,
            "-extfile",
            f"{name}.ext",
            "-out",
            f"{name}.crt",
        )
        (self._folder / f"{name}.key").chmod(0o600)
        return self.papers(name)

    def papers(self, name: str) -> Papers:
        """Where those of ``name`` are."""
        return Papers(self._folder / "ca.crt", self._folder / f"{name}.crt", self._folder / f"{name}.key")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._folder, check=True, capture_output=True)
