"""The names of everything under a root: each name as a function, relative to the root, with ``/`` between parts.

A chunk's name follows from its address alone, so no index is needed to find it. It also carries the namespace's id, so
that a listing can separate namespaces without opening a file.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

import numpy as np
import numpy.typing as npt

from kvstore.core.address import ADDRESS_BYTES, Address
from kvstore.core.namespace import NamespaceId

Name = NewType("Name", str)

FORMAT = Name("FORMAT")
CHUNKS = Name("chunks")
STAGING = Name("staging")
QUARANTINE = Name("quarantine")
NAMESPACES = Name("namespaces")
TRASH = Name("trash")
PLANS = Name("plans")
PINS = Name("pins")
GENERATIONS = Name("generations")
HOST = Name("host")
"""How the processes of one host share the root without etcd (``kvstore.host``)."""
RESERVE = Name("reserve")
BOUND = Name("bound")
FOLDERS = frozenset({CHUNKS, STAGING, QUARANTINE, NAMESPACES, TRASH, PLANS, PINS, GENERATIONS, HOST})

SHARD_BITS_MAX = 16
NAMESPACE_ID_BYTES = 8
SWEEP_ID_BYTES = 16
RUN_ID_BYTES = 8
SESSION_ID_BYTES = 16
PIN_ID_BYTES = 16
NUMBER_DIGITS_MAX = 18
OWNER_CHARACTERS_MAX = 128
"""Limit on a folder's name. A longer owner gets a digest, since no file system has room for what etcd allows."""

_PLAIN = frozenset((string.ascii_letters + string.digits + "-_.~").encode())


def shard(address: Address, shard_bits: int) -> int:
    """Returns the shard of an address: its first ``shard_bits`` bits as a number."""
    return int.from_bytes(address[:2], "big") >> (16 - shard_bits)


def shard_folder(number: int) -> Name:
    """Returns the folder of one shard."""
    return Name(f"{CHUNKS}/{number:04x}")


def chunk(address: Address, namespace: NamespaceId, shard_bits: int) -> Name:
    """Returns P(address): the one final name of a chunk."""
    return Name(f"{CHUNKS}/{shard(address, shard_bits):04x}/{address.hex()}.{namespace.hex()}")


def parse_chunk(file_name: str) -> tuple[Address, NamespaceId] | None:
    """Returns address and namespace id from the last part of a chunk's name; None for anything else."""
    address, dot, namespace = file_name.partition(".")
    if not dot or len(address) != 2 * ADDRESS_BYTES or len(namespace) != 2 * NAMESPACE_ID_BYTES:
        return None
    try:
        found = Address(bytes.fromhex(address)), NamespaceId(bytes.fromhex(namespace))
    except ValueError:
        return None
    # fromhex also takes spaces and upper case, which chunk names never have.
    return found if f"{found[0].hex()}.{found[1].hex()}" == file_name else None


def staging_folder(session: bytes) -> Name:
    """Returns the folder in which one session stages; no other session writes there (rule W2)."""
    return Name(f"{STAGING}/{session.hex()}")


def staged(session: bytes, number: int) -> Name:
    """Returns a name that this session uses once."""
    return Name(f"{STAGING}/{session.hex()}/{number}.part")


def quarantined(address: Address, session: bytes, number: int) -> Name:
    """Returns the name under which a session sets a damaged file aside; unique, so that it replaces nothing."""
    return Name(f"{QUARANTINE}/{address.hex()}.{session.hex()}.{number}")


def is_quarantined(file_name: str) -> bool:
    """True if ``quarantined`` makes such a name. People put other files there."""
    address, _, rest = file_name.partition(".")
    session, _, number = rest.partition(".")
    return bool(_parse_id(address, ADDRESS_BYTES) and _parse_id(session, SESSION_ID_BYTES) and number.isdecimal())


def trash_folder(sweep: bytes) -> Name:
    """Returns the folder of one sweep: as long as it exists, chunks may be renamed into it (rule F1)."""
    return Name(f"{TRASH}/{sweep.hex()}")


def trashed(sweep: bytes, chunk_name: Name, run: bytes) -> Name:
    """Returns the name that one run of a sweep gives a chunk; ``run`` is used once, so that no file is replaced."""
    return Name(f"{TRASH}/{sweep.hex()}/{chunk_name.rpartition('/')[2]}.{run.hex()}")


def parse_trashed(file_name: str) -> tuple[Address, NamespaceId] | None:
    """Returns address and namespace id from the last part of a trash entry's name; None for anything else."""
    chunk_part, dot, run = file_name.rpartition(".")
    return parse_chunk(chunk_part) if dot and len(run) == 2 * RUN_ID_BYTES else None


def parse_sweep(folder_name: str) -> bytes | None:
    """Returns the sweep from the last part of a trash folder's or plan's name; None for anything else."""
    return _parse_id(folder_name, SWEEP_ID_BYTES)


def plan(sweep: bytes, checksum: bytes) -> Name:
    """Returns the name of the exact list of a sweep's victims; its checksum distinguishes two lists of a sweep."""
    return Name(f"{PLANS}/{sweep.hex()}.{checksum.hex()}")


def parse_plan(file_name: str) -> bytes | None:
    """Returns the sweep from the last part of a plan's name; None for anything else."""
    sweep, dot, checksum = file_name.partition(".")
    return parse_sweep(sweep) if dot and parse_sweep(checksum) else None


def twin(owner: str, pin: bytes) -> Name:
    """Returns the name of a pin's twin. The owner, which may be any text, is quoted; the twin's content names it."""
    raw = owner.encode()
    quoted = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in raw)
    if quoted.startswith("."):
        quoted = f"%2E{quoted[1:]}"  # "..", which no quoting changes, must not lead out of the folder
    if len(quoted) > OWNER_CHARACTERS_MAX:
        quoted = f"={hashlib.blake2b(raw, digest_size=16).hexdigest()}"
    return Name(f"{PINS}/{quoted}/{pin.hex()}")


def parse_twin(file_name: str) -> bytes | None:
    """Returns the pin from the last part of a twin's name; None for anything else."""
    return _parse_id(file_name, PIN_ID_BYTES)


def generation(number: int) -> Name:
    """Returns the name of one generation's record; the highest number is the current generation."""
    return Name(f"{GENERATIONS}/{number}")


def parse_generation(file_name: str) -> int | None:
    """Returns the number from the last part of a generation's name; None for anything else."""
    if not (file_name.isascii() and file_name.isdecimal()) or file_name.startswith("0"):
        return None
    return int(file_name) if len(file_name) <= NUMBER_DIGITS_MAX else None


def namespace_claim(key: bytes) -> Name:
    """Returns the name of the record of a claim: which layout a (tenant, name) has; ``key`` digests both."""
    return Name(f"{NAMESPACES}/{key.hex()}.claim")


def namespace_record(digest: bytes) -> Name:
    """Returns the name of a namespace's full description, which makes chunk files understandable without etcd."""
    return Name(f"{NAMESPACES}/{digest.hex()}.json")


def _parse_id(text: str, size_bytes: int) -> bytes | None:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        return None
    return found if len(found) == size_bytes and found.hex() == text else None


# Names of chunk files in columns: the same as ``places.parse_chunk``, for many names in one call.


U64 = npt.NDArray[np.uint64]

NAME_CHARS = 2 * ADDRESS_BYTES + 1 + 2 * NAMESPACE_ID_BYTES
_DOT = 2 * ADDRESS_BYTES
_NO_DIGIT = 255
_DIGITS = np.full(256, _NO_DIGIT, np.uint8)
_DIGITS[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
_PLACES = np.arange(NAME_CHARS) != _DOT


@dataclass(frozen=True, slots=True)
class NameColumns:
    """Parsed names. ``ours`` has one element for each name given; the other columns one for each that is ours."""

    ours: npt.NDArray[np.bool_]
    firsts: U64
    """The first 8 bytes of each address as a big-endian number, so that their order is that of addresses."""
    lasts: U64
    """The last 8 bytes of each address as a big-endian number."""
    namespaces: U64
    """Namespace ids as big-endian numbers."""


def parse_names(names: Sequence[str]) -> NameColumns:
    """Parses the last parts of names of files; anything but a chunk's name is not ours."""
    ours = np.fromiter((len(name) == NAME_CHARS for name in names), np.bool_, len(names))
    text = "".join(name for name in names if len(name) == NAME_CHARS).encode("ascii", "replace")
    chars = np.frombuffer(text, np.uint8).reshape(-1, NAME_CHARS)
    digits = _DIGITS[chars]
    good = (digits[:, _PLACES] != _NO_DIGIT).all(axis=1) & (chars[:, _DOT] == ord("."))
    ours[ours] = good
    digits = digits[good]
    return NameColumns(ours, _numbers(digits[:, :16]), _numbers(digits[:, 16:_DOT]), _numbers(digits[:, _DOT + 1 :]))


def _numbers(digits: npt.NDArray[np.uint8]) -> U64:
    """Returns numbers from 16 hexadecimal digits each."""
    return ((digits[:, 0::2] << 4) | digits[:, 1::2]).view(">u8").astype(np.uint64).reshape(-1)
