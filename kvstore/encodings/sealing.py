"""Encryption of one chunk file: AES-256-GCM with a key of the file's own, each part tied to its place in it.

Separate from the codec, because only this module does cryptography. A file's key is derived from its tenant's key and
16 random bytes in its header. So a nonce never repeats under one key, however many chunks a tenant has, and nothing
depends on incarnations being unique.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvstore.buffers import ReadBuffer
from kvstore.errors import InvalidRequest
from kvstore.format.header import Damage, Damaged

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

HEADER_PART = 0xFFFFFFFF
"""The part number of the header's encrypted part; sections have their own numbers."""


def check_available() -> None:
    """Raises InvalidRequest if the library is not installed."""
    try:
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
    except ImportError as cause:
        raise InvalidRequest("encryption needs a library: pip install 'kvstore-llm[encryption]'") from cause


class Seal:
    """Seals and opens the parts of one file, whose first 128 bytes are ``fixed``. Thread-safe."""

    __slots__ = ("_cipher", "_fixed")

    def __init__(self, secret: bytes, salt: bytes, fixed: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        key = hashlib.blake2b(salt, key=secret, digest_size=32, person=b"kvstore.seal.1").digest()
        self._cipher: AESGCM = AESGCM(key)
        self._fixed = fixed

    def close(self, part: int, plain: ReadBuffer) -> bytes:
        """Returns a part encrypted, with its tag behind it."""
        return self._cipher.encrypt(part.to_bytes(12, "little"), plain, self._fixed)

    def open(self, part: int, sealed: ReadBuffer) -> bytes:
        """Decrypts a part. Raises Damaged unless ``close`` sealed it as that part of that file."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(part.to_bytes(12, "little"), sealed, self._fixed)
        except InvalidTag:
            raise Damaged(Damage.SEAL) from None
