"""The cluster's certificates: one authority, one certificate for each of its machines.

A machine shows the same one as a server (etcd, worker), as a member to other members, and as a client.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from tests.kit.certificates import Authority


@dataclass(frozen=True, slots=True)
class Papers:
    """PEM files of one machine."""

    ca: Path
    cert: Path
    key: Path


def papers_of(authority: Authority, name: str, *addresses: str) -> Papers:
    """A certificate for ``name`` on this host and at these IP addresses."""
    places = [x509.IPAddress(ipaddress.ip_address(each)) for each in ("127.0.0.1", *addresses)]
    pair = authority.issue(name, x509.DNSName(name), *places)
    return Papers(authority.ca, pair.cert, pair.key)
