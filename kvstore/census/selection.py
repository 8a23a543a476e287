"""The namespaces that a clear deletes, as an operator selects them and as nodes carry it out.

An operator types a ``Selection``. It is resolved once, against the namespaces that the root knows, to a ``ClearOrder``,
by which every node understands the same. Pure: no I/O, no clock.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from hashlib import blake2b

from kvstore.core.namespace import DIGEST_BYTES, Namespace, NamespaceDigest, NamespaceId
from kvstore.core.validate import brief, check_text, parse_json
from kvstore.errors import InvalidRequest
from kvstore.format.places import NAMESPACE_ID_BYTES

NAMESPACES_MAX = 10_000
"""Limit on the namespaces of one order: it is one value in etcd."""
TEXT_BYTES_MAX = 4096
"""The limit of each text field: a worker keeps the texts of its operations, and lists a hundred of them."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Every field that is given must hold of a namespace. Raises InvalidRequest if nothing is given, or no sense."""

    namespace: bytes | None = None
    """A namespace's digest."""
    tenant: str | None = None
    """All of a tenant; empty: those without one."""
    fingerprint: str = ""
    """All whose fingerprint begins so."""

    def __post_init__(self) -> None:
        if self.namespace is not None and not (
            isinstance(self.namespace, bytes) and len(self.namespace) == DIGEST_BYTES
        ):
            raise InvalidRequest(f"namespace={brief(self.namespace)}: expected its digest (cache.namespace.digest)")
        if self.tenant is not None:
            check_text("tenant", self.tenant, TEXT_BYTES_MAX)
        check_text("fingerprint", self.fingerprint, TEXT_BYTES_MAX)
        if all(getattr(self, each.name) == each.default for each in fields(self)):
            raise InvalidRequest(
                "nothing is selected: give a namespace, tenant or fingerprint (all of a root: remove it)"
            )

    def describe(self) -> str:
        """For people: what is meant, in the words of the command line."""
        said = [] if self.namespace is None else [f"namespace {self.namespace.hex()[:16]}"]
        said += [] if self.tenant is None else [f"tenant {self.tenant!r}"]
        said += [f"fingerprint {self.fingerprint}..."] if self.fingerprint else []
        return ", ".join(said)

    def resolve(self, namespaces: Iterable[Namespace], now_s: float) -> ClearOrder:
        """Resolves it against all ``namespaces`` of the root. Raises InvalidRequest if it selects none, or too many."""
        found = frozenset(each.id for each in namespaces if self._means(each))
        if not found:
            raise InvalidRequest(
                f"nothing matches: no namespace of this root is meant by {self.describe()} (kvstore ls lists them)"
            )
        if len(found) > NAMESPACES_MAX:
            raise InvalidRequest(
                f"{len(found)} namespaces are meant, over the limit of {NAMESPACES_MAX}: narrow it down"
            )
        return ClearOrder(found, now_s)

    def _means(self, namespace: Namespace) -> bool:
        return (
            (self.namespace is None or namespace.digest == self.namespace)
            and (self.tenant is None or namespace.tenant == self.tenant)
            and namespace.fingerprint.startswith(self.fingerprint)
        )


@dataclass(frozen=True, slots=True)
class ClearOrder:
    """A clear: all chunks of these namespaces, as there were when it was issued."""

    namespaces: frozenset[NamespaceId] = frozenset()
    issued_s: float = 0.0

    @property
    def name(self) -> str:
        """A digest of the order. No two orders have the same: none are issued at the same moment."""
        return blake2b(self.to_json(), digest_size=16).hexdigest()

    def means(self, namespace: NamespaceDigest | NamespaceId) -> bool:
        """True if it deletes the chunks of a namespace."""
        return NamespaceId(namespace[:NAMESPACE_ID_BYTES]) in self.namespaces

    def to_json(self) -> bytes:
        """The order as nodes publish it."""
        return json.dumps({"namespaces": b"".join(sorted(self.namespaces)).hex(), "issued_s": self.issued_s}).encode()

    @classmethod
    def from_json(cls, content: bytes) -> ClearOrder:
        """The inverse. Raises InvalidRequest for anything else."""
        try:
            record = parse_json(content)
            packed, issued_s = bytes.fromhex(record["namespaces"]), float(record["issued_s"])
        except (ValueError, KeyError, TypeError) as cause:
            raise InvalidRequest(f"not an order to clear: {cause}") from cause
        size = NAMESPACE_ID_BYTES
        if not packed or len(packed) % size:
            raise InvalidRequest(f"not an order to clear: ids of {len(packed)} bytes")
        return cls(frozenset(NamespaceId(packed[at : at + size]) for at in range(0, len(packed), size)), issued_s)

    @classmethod
    def of_all(cls, orders: Collection[ClearOrder]) -> ClearOrder:
        """What several mean together."""
        return cls(frozenset[NamespaceId]().union(*(each.namespaces for each in orders)))


def checked_selection(value: object) -> Selection:
    """Returns ``value``, which is a selection. Raises InvalidRequest."""
    if not isinstance(value, Selection):
        raise InvalidRequest(
            f"selection={brief(value)}: expected kvstore.Selection, such as Selection(tenant=...); of one "
            "namespace, Selection(namespace=cache.namespace.digest)"
        )
    return value


NOTHING = ClearOrder()
