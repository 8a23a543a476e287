"""Limits on one request, the same for every store, so that what memory accepts etcd accepts too.

They are etcd's defaults (1.5 MiB a request, 128 operations a transaction) with room left for the envelope.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import InvalidRequest
from kvstore.meta.interface import Compare, Delete, Put, ValueIs

KEY_BYTES_MAX = 4096
REQUEST_BYTES_MAX = 1_500_000
OPERATIONS_MAX = 128
LEASE_TTL_S_MAX = 365 * 86_400


def check_request(compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> None:
    """Raises InvalidRequest if a transaction is over a limit or names a key twice."""
    if len(compares) > OPERATIONS_MAX or len(operations) > OPERATIONS_MAX:
        raise InvalidRequest(
            f"a transaction has {len(compares)} compares and {len(operations)} operations, over the limit of "
            f"{OPERATIONS_MAX} each: split it"
        )
    keys = [operation.key for operation in operations]
    if len(set(keys)) != len(keys):
        raise InvalidRequest("a transaction writes or deletes a key twice: name each key once")
    size = sum(len(operation.value) for operation in operations if isinstance(operation, Put))
    size += sum(len(compare.value) for compare in compares if isinstance(compare, ValueIs))
    for key in keys + [compare.key for compare in compares]:
        size += check_key(key)
    if size > REQUEST_BYTES_MAX:
        raise InvalidRequest(
            f"a request to the metadata store has {size} bytes, over the limit of {REQUEST_BYTES_MAX}: "
            "store less in one key, or split it over several"
        )


def check_key(key: str) -> int:
    """Returns the size of ``key`` in bytes. Raises InvalidRequest for an empty or oversized key."""
    size = len(key.encode())
    if not 1 <= size <= KEY_BYTES_MAX:
        raise InvalidRequest(f"a metadata key has {size} bytes: expected 1 to {KEY_BYTES_MAX}")
    return size


def check_ttl(ttl_s: int) -> None:
    """Raises InvalidRequest if ``ttl_s`` is not a whole number of seconds from 1 to a year."""
    if not 1 <= ttl_s <= LEASE_TTL_S_MAX:
        raise InvalidRequest(f"lease ttl_s={ttl_s!r}: expected a whole number from 1 to {LEASE_TTL_S_MAX}")


def check_from_revision(revision: int) -> None:
    """Raises InvalidRequest if a watch would start before the first revision (0 means 'now' to etcd)."""
    if revision < 1:
        raise InvalidRequest(f"watch from_revision={revision}: expected 1 or more, such as a snapshot's revision + 1")
