"""Encodes a chunk to the bytes of its file, and decodes it part by part. Pure except for the libraries it calls.

The format defines where the bytes are; nodes choose the encoding and do the I/O.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.core.buffers import Pieces, ReadBuffer
from kvstore.core.metrics import NodeCount
from kvstore.core.validate import parse_json
from kvstore.errors import InvalidRequest
from kvstore.format.header import (
    FIXED_BYTES,
    KEY_ID_BYTES,
    TAG_BYTES,
    Damage,
    Damaged,
    Encoding,
    Expected,
    Header,
    Incarnation,
    Stored,
    checksum,
    decode_encoded,
    encode_fixed,
    encode_header,
    inner,
    inner_of,
    plain_header,
    sealed_of,
)
from kvstore.security.tls import LOOK_S, WatchedFiles, read_secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from zstandard import ZstdCompressor, ZstdDecompressor


# Encryption of one chunk file: AES-256-GCM with a key of the file's own, each part tied to its place in it.
#
# A file's key is derived from its tenant's key and 16 random bytes in its header. So a nonce never repeats under one
# key, however many chunks a tenant has, and nothing depends on incarnations being unique.


HEADER_PART = 0xFFFFFFFF
"""The part number of the header's encrypted part; sections have their own numbers."""


def check_encryption() -> None:
    """Raises InvalidRequest if the library is not installed."""
    try:
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
    except ImportError as cause:
        raise InvalidRequest("encryption needs a library: pip install 'kvstore-llm[encryption]'") from cause


class PartCipher:
    """Seals and opens the parts of one file, whose first 128 bytes are ``fixed``. Thread-safe."""

    __slots__ = ("_cipher", "_fixed")

    def __init__(self, secret: bytes, salt: bytes, fixed: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        key = hashlib.blake2b(salt, key=secret, digest_size=32, person=b"kvstore.seal.1").digest()
        self._cipher: AESGCM = AESGCM(key)
        self._fixed = fixed

    def close(self, part: int, plain: ReadBuffer) -> bytes:
        return self._cipher.encrypt(part.to_bytes(12, "little"), plain, self._fixed)

    def open(self, part: int, sealed: ReadBuffer) -> bytes:
        """Decrypts a part. Raises Damaged unless ``close`` sealed it as that part of that file."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(part.to_bytes(12, "little"), sealed, self._fixed)
        except InvalidTag:
            raise Damaged(Damage.SEAL) from None


# Compression of sections: byte planes apart, then zstd.
#
# Neighbouring elements of KV have similar exponents, and mantissas like noise. Once they are apart, the exponents
# shrink and the mantissas cost little to pass over. Lossless, and each section separately, so that one can be read
# without the others.


LEVEL = 1
"""The level of zstd. Higher levels are slower and gain nothing on KV (docs/performance-notes.md)."""

_own = threading.local()
"""zstd's contexts are for one thread at a time, and making one costs more than a small section."""


def is_available() -> bool:
    """True if the library is installed."""
    try:
        import zstandard  # noqa: F401
    except ImportError:
        return False
    return True


def check_compression() -> None:
    """Raises InvalidRequest if the library is not installed."""
    if not is_available():
        raise InvalidRequest("compression needs a library: pip install 'kvstore-llm[compression]'")


def squeeze(section: memoryview, itemsize: int) -> bytes | memoryview:
    """Compresses a section; returns the section itself if that would not be shorter."""
    compressor: ZstdCompressor | None = getattr(_own, "compressor", None)
    if compressor is None:
        from zstandard import ZstdCompressor

        compressor = _own.compressor = ZstdCompressor(level=LEVEL, write_content_size=True)
    made = compressor.compress(split_planes(section, itemsize))
    return made if len(made) < len(section) else section


def stretch(stored: ReadBuffer, section: memoryview, itemsize: int) -> None:
    """Decompresses what ``squeeze`` returned into ``section``. Raises Damaged if the result does not fit."""
    if len(stored) == len(section):
        section[:] = stored
        return
    join_planes(_decompressed(stored, len(section)), itemsize, section)


def _decompressed(stored: ReadBuffer, size_bytes: int) -> bytes:
    import zstandard

    decompressor: ZstdDecompressor | None = getattr(_own, "decompressor", None)
    if decompressor is None:
        decompressor = _own.decompressor = zstandard.ZstdDecompressor()
    try:
        # Check the size before use: a frame that claims more would allocate that much.
        if zstandard.frame_content_size(stored) != size_bytes:
            raise Damaged(Damage.ENCODING)
        planes = decompressor.decompress(stored)
    except zstandard.ZstdError:
        raise Damaged(Damage.ENCODING) from None
    if len(planes) != size_bytes:
        raise Damaged(Damage.ENCODING)
    return planes


def split_planes(section: memoryview, itemsize: int) -> memoryview:
    """Returns all first bytes of elements, then all second ones, and so on; bytes that fill no element come last."""
    whole = len(section) - len(section) % itemsize
    if itemsize == 1 or not whole:
        return section
    planes = np.empty(len(section), np.uint8)
    elements = np.frombuffer(section, np.uint8, whole).reshape(-1, itemsize)
    planes[:whole].reshape(itemsize, -1)[:] = elements.T
    planes[whole:] = np.frombuffer(section[whole:], np.uint8)
    return planes.data


def join_planes(planes: ReadBuffer, itemsize: int, section: memoryview) -> None:
    """Joins the planes that ``split_planes`` made, into ``section``."""
    whole = len(section) - len(section) % itemsize
    if itemsize == 1 or not whole:
        section[:] = planes
        return
    split = np.frombuffer(planes, np.uint8, whole).reshape(itemsize, -1)
    joined = np.frombuffer(section, np.uint8, whole)
    for at in range(itemsize):  # plane by plane is eight times as fast as a transposed copy
        joined[at::itemsize] = split[at]
    section[whole:] = memoryview(planes)[whole:]


# The keys of tenants: a file of secrets, and its current content.


log = logging.getLogger(__name__)

KEY_BYTES = 32
_WHAT = "key file"


@dataclass(frozen=True, slots=True)
class Key:
    """One secret of a tenant."""

    name: str
    secret: bytes = field(repr=False)

    @property
    def id(self) -> bytes:
        """The key's id in the files encrypted with it.

        It is derived from the secret, not from its name: a name that is reused for another secret then opens no file
        wrongly.
        """
        digest = hashlib.blake2b(key=self.secret, digest_size=KEY_ID_BYTES, person=b"kvstore.keyid.1")
        return digest.digest()


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All keys of all tenants, as of one reading of the file."""

    current: Mapping[str, Key | None]
    """For each listed tenant, the key of new files; None if new files are not encrypted any more."""
    by_id: Mapping[bytes, Key]

    @classmethod
    def parse(cls, content: bytes) -> KeyRing:
        """Parses the content of a key file. Raises InvalidRequest, which never shows a secret."""
        current: dict[str, Key | None] = {}
        by_id: dict[bytes, Key] = {}
        tenants = _object(_loaded(content).get("tenants"), "tenants")
        for tenant, fields in tenants.items():
            said = _object(fields, f"tenant {tenant!r}")
            keys = {name: _key(tenant, name, text) for name, text in _object(said.get("keys"), "keys").items()}
            # Check its type first: a list cannot be a dict's key, and looking it up would raise a TypeError that no
            # caller expects.
            name = said.get("current")
            if "current" not in said or not (name is None or (isinstance(name, str) and name in keys)):
                raise InvalidRequest(
                    f"the {_WHAT} names no current key of tenant {tenant!r}: expected one of {sorted(keys)}, or null "
                    "(new chunks are not encrypted any more)"
                )
            current[tenant] = None if name is None else keys[name]
            by_id.update((key.id, key) for key in keys.values())
        return cls(current, by_id)


EMPTY = KeyRing({}, {})


class KeyFile:
    """A key file, read again when it changes. Thread-safe. ``load`` it first."""

    def __init__(self, path: str | PathLike[str], *, look_s: float = LOOK_S) -> None:
        """``look_s`` is the time between two looks for a change."""
        self._path = Path(path)
        self._watched = WatchedFiles([self._path], look_s)
        self._loading = threading.Lock()  # lets only one thread read the key file again
        self._ring: KeyRing | None = None
        self.noted: Callable[[NodeCount], object] = lambda counter: None
        """Called with ``keys_reloaded`` or ``keys_refused``."""

    def load(self) -> KeyFile:
        """Reads the file. Raises InvalidRequest if others may read it, or if it is not a key file."""
        check_encryption()
        self._watched.changed()  # before reading: later changes are then seen
        self._ring = KeyRing.parse(read_secret(self._path, _WHAT))
        return self

    @property
    def ring(self) -> KeyRing:
        # One thread reads the file again while the others use the old keys: it may lie on a slow mount.
        if self._loading.acquire(blocking=False):
            try:
                counter = self._reload() if self._watched.changed() else None
            finally:
                self._loading.release()
            if counter is not None:
                self.noted(counter)
        assert self._ring is not None, "load it first: without keys, chunks would be written as plain text"
        return self._ring

    def _reload(self) -> NodeCount:
        try:
            ring = KeyRing.parse(read_secret(self._path, _WHAT))
            before = self._ring or EMPTY
            gone = [tenant for tenant, key in before.current.items() if key and tenant not in ring.current]
            if gone:
                # Refuse: a slip of the editor would make this node write that tenant's chunks as plain text from now
                # on.
                raise InvalidRequest(
                    f'the {_WHAT} no longer lists tenants {gone}: say "current": null first, then restart without them'
                )
        except InvalidRequest as error:
            log.error("keys.refused %s; the previous keys stay in use", error)
            return NodeCount.KEYS_REFUSED
        self._ring = ring
        log.info("keys.reloaded tenants=%d keys=%d", len(ring.current), len(ring.by_id))
        return NodeCount.KEYS_RELOADED


def _loaded(content: bytes) -> Mapping[str, Any]:
    try:
        loaded = parse_json(content, once=True)
    except InvalidRequest as twice:
        raise InvalidRequest(f"the {_WHAT}: {twice}") from None
    except ValueError:
        # Without the cause, which would show a piece of the file.
        raise InvalidRequest(f"the {_WHAT} is not JSON") from None
    return _object(loaded, "the whole")


def _object(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(
            f'the {_WHAT} has no object for {what}: expected {{"tenants": {{NAME: {{"current": KEY, "keys": '
            '{KEY: "base64 of 32 bytes", ...}}}, ...}}'
        )
    return value


def _key(tenant: str, name: str, text: object) -> Key:
    try:
        secret = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (ValueError, binascii.Error):
        secret = b""
    if len(secret) != KEY_BYTES:
        raise InvalidRequest(
            f"key {name!r} of tenant {tenant!r} is not {KEY_BYTES} bytes in base64: make one with "
            "`openssl rand -base64 32`"
        )
    return Key(name, secret)


@dataclass(frozen=True, slots=True)
class Wish:
    """The wanted encoding of a chunk."""

    compress: bool = False
    key: Key | None = None

    @property
    def encoding(self) -> Encoding:
        """The encoding as the header states it."""
        compressed = Encoding.COMPRESSED if self.compress else Encoding.PLAIN
        return compressed | (Encoding.ENCRYPTED if self.key else Encoding.PLAIN)


PLAIN = Wish()


def encode_chunk(
    expected: Expected,
    incarnation: Incarnation,
    sections: Pieces,
    wish: Wish,
    salt: bytes,
    checksums: Sequence[int] | None = None,
) -> list[memoryview]:
    """Returns the bytes of an encoded file, in pieces. ``salt`` is 16 random bytes that were never used before.

    ``checksums`` are the known checksums of the sections, if any: they reveal bytes that changed since.
    """
    assert wish.encoding and len(sections) == expected.section_count
    encoding, key = wish.encoding, wish.key
    over = TAG_BYTES if key else 0
    parts: list[bytes | memoryview] = list(sections)
    if wish.compress:
        parts = [squeeze(section, expected.itemsize) for section in sections]
    payload_bytes = sum(map(len, parts)) + over * len(parts)
    fixed = encode_fixed(expected, incarnation, encoding, key.id if key else b"", payload_bytes)
    content: bytes = inner(expected, list(map(checksum, sections)) if checksums is None else checksums)
    if key:
        seal = PartCipher(key.secret, salt, fixed)
        parts = [seal.close(at, part) for at, part in enumerate(parts)]
        content = seal.close(HEADER_PART, content)
    stored = [Stored(checksum(part), len(part)) for part in parts]
    # Leave out the descent: it has tokens, which an encrypted file must not show without the key.
    header = encode_header(fixed, content, salt if key else b"", stored, b"" if key else expected.descent)
    return [memoryview(header), *[memoryview(part) for part in parts]]


class Decoding:
    """An encoded file whose header is known and, if it is encrypted, decrypted. Thread-safe."""

    __slots__ = ("_offsets", "_seal", "header", "plain_header")

    def __init__(self, raw: ReadBuffer, header: Header, key: Key | None) -> None:
        """``raw`` is the whole header, ``header`` its fields, ``key`` the key that it names. Raises Damaged."""
        self.header = header
        sealed, salt = sealed_of(raw)
        self._seal = PartCipher(key.secret, salt, bytes(raw[:FIXED_BYTES])) if key else None
        content = self._seal.open(HEADER_PART, sealed) if self._seal else inner_of(raw)
        self.plain_header = bytes(plain_header(raw, content))
        """The header of version 1 that this one stands for."""
        offsets, at = [], header.header_bytes
        for each in header.stored:
            offsets.append(at)
            at += each.size_bytes
        self._offsets = offsets

    def where(self, index: int) -> tuple[int, int]:
        return self._offsets[index], self.header.stored[index].size_bytes

    def section(self, index: int, stored: memoryview, section: memoryview) -> None:
        """Decodes a stored section into memory of its size. Raises Damaged, which leaves that memory undefined."""
        if checksum(stored) != self.header.stored[index].checksum:
            raise Damaged(Damage.SECTION_CHECKSUM)
        opened: ReadBuffer = self._seal.open(index, stored) if self._seal else stored
        if Encoding.COMPRESSED in self.header.encoding:
            stretch(opened, section, self.header.itemsize)
        else:
            section[:] = opened


def decode_header(raw: ReadBuffer, expected: Expected) -> Header:
    """Decodes the header of an encoded file that must be of the chunk ``expected``, as far as it shows without a key.

    Raises Damaged.
    """
    header = decode_encoded(raw)
    names = (header.kind, header.address, header.parent, header.namespace, header.depth)
    if names != (expected.kind, expected.address, expected.parent, expected.namespace, expected.depth):
        raise Damaged(Damage.IDENTITY)
    if header.section_bytes != expected.section_bytes or len(header.stored) != expected.section_count:
        raise Damaged(Damage.GEOMETRY)
    return header
