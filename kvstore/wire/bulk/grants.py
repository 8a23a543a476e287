"""Grants: two ends that met over gRPC prove it on another connection, without sending their secret."""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import struct
from dataclasses import dataclass

GRANT_BYTES = 16
SECRET_BYTES = 32
NONCE_BYTES = 16
PROOF_BYTES = 32
_HELLO = struct.Struct(f"<{GRANT_BYTES}s{NONCE_BYTES}s{PROOF_BYTES}s")
HELLO_BYTES = _HELLO.size
BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission to open one connection."""

    id: bytes
    secret: bytes

    @classmethod
    def fresh(cls) -> Grant:
        """Returns a grant that nobody else has."""
        return cls(os.urandom(GRANT_BYTES), os.urandom(SECRET_BYTES))

    def hello(self, nonce: bytes) -> bytes:
        """Returns the client's greeting."""
        return _HELLO.pack(self.id, nonce, _proof(self.secret, b"client", nonce))

    def welcome(self, nonce: bytes) -> bytes:
        """Returns the worker's answer."""
        return _proof(self.secret, b"worker", nonce)

    def is_welcome(self, nonce: bytes, payload: bytes) -> bool:
        """True if an answer comes from the worker that gave the grant."""
        return hmac.compare_digest(self.welcome(nonce), payload)

    def is_hello(self, nonce: bytes, proof: bytes) -> bool:
        """True if a greeting comes from the client that was given the grant."""
        return hmac.compare_digest(_proof(self.secret, b"client", nonce), proof)


def read_hello(payload: bytes) -> tuple[bytes, bytes, bytes]:
    """Returns grant id, nonce and proof of a greeting of HELLO_BYTES bytes."""
    grant, nonce, proof = _HELLO.unpack(payload)
    return grant, nonce, proof


def boot_id() -> str:
    """Returns the id of this boot of this host; empty if the system does not say.

    Raises OSError if this process has no file descriptor left to read it: that says nothing about the host.
    """
    try:
        with open(BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return ""


def _proof(secret: bytes, role: bytes, nonce: bytes) -> bytes:
    return hashlib.blake2b(role + nonce, key=secret, digest_size=PROOF_BYTES).digest()
