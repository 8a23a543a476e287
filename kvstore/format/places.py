"""Where things lie under a root: every name as a function, relative to the root, with ``/`` between parts.

A chunk's name follows from its address alone, so that no index is needed to find it; it also carries the namespace's
id, so that a listing tells namespaces apart without opening a file.
"""

from __future__ import annotations

from typing import NewType

from kvstore.address import ADDRESS_BYTES, Address
from kvstore.namespace import NamespaceId

Name = NewType("Name", str)

FORMAT = Name("FORMAT")
CHUNKS = Name("chunks")
STAGING = Name("staging")
QUARANTINE = Name("quarantine")
NAMESPACES = Name("namespaces")

SHARD_BITS_MAX = 16
NAMESPACE_ID_BYTES = 8


def shard(address: Address, shard_bits: int) -> int:
    """The shard of an address: its first ``shard_bits`` bits as a number."""
    return int.from_bytes(address[:2], "big") >> (16 - shard_bits)


def shard_folder(number: int) -> Name:
    """The folder of one shard."""
    return Name(f"{CHUNKS}/{number:04x}")


def chunk(address: Address, namespace: NamespaceId, shard_bits: int) -> Name:
    """P(address): the one final name of a chunk."""
    return Name(f"{CHUNKS}/{shard(address, shard_bits):04x}/{address.hex()}.{namespace.hex()}")


def parse_chunk(file_name: str) -> tuple[Address, NamespaceId] | None:
    """Address and namespace id from the last part of a chunk's name; None for anything else."""
    address, dot, namespace = file_name.partition(".")
    if not dot or len(address) != 2 * ADDRESS_BYTES or len(namespace) != 2 * NAMESPACE_ID_BYTES:
        return None
    try:
        found = Address(bytes.fromhex(address)), NamespaceId(bytes.fromhex(namespace))
    except ValueError:
        return None
    # fromhex also takes spaces and upper case, which no name of ours has.
    return found if f"{found[0].hex()}.{found[1].hex()}" == file_name else None


def staging_folder(session: bytes) -> Name:
    """The folder in which one session stages; nobody else writes there (rule W2)."""
    return Name(f"{STAGING}/{session.hex()}")


def staged(session: bytes, number: int) -> Name:
    """A name that this session uses once."""
    return Name(f"{STAGING}/{session.hex()}/{number}.part")


def quarantined(address: Address, session: bytes, number: int) -> Name:
    """Where a session sets a damaged file aside; unique, so that it replaces nothing."""
    return Name(f"{QUARANTINE}/{address.hex()}.{session.hex()}.{number}")


def namespace_claim(key: bytes) -> Name:
    """The record that says which layout a (tenant, name) has; ``key`` digests both."""
    return Name(f"{NAMESPACES}/{key.hex()}.claim")


def namespace_record(digest: bytes) -> Name:
    """The full description of one namespace, so that chunk files can be understood without etcd."""
    return Name(f"{NAMESPACES}/{digest.hex()}.json")
