"""The namespaces' records on a root: can they be read, and which namespaces do they describe?"""

from __future__ import annotations

from kvstore.errors import InvalidRequest
from kvstore.format import places
from kvstore.format.places import Name
from kvstore.fsck.report import Kind
from kvstore.layout import Layout
from kvstore.namespace import Namespace, NamespaceId
from kvstore.parsing import parse_json
from kvstore.root.identity import read_small
from kvstore.root.interface import Entry, Root
from kvstore.root.namespaces import RECORD_BYTES_MAX, claim_key

Wrong = tuple[Kind, str]
"""The fault of a record."""


class Records:
    """Reads records one by one; ``ids`` are those of the namespaces that have a good one."""

    def __init__(self, root: Root) -> None:
        self.ids: set[NamespaceId] = set()
        self._root = root

    def read(self, entry: Entry) -> Wrong | None:
        """Reads one entry; returns its fault, or None if it has none or is gone. Raises the root's errors."""
        stem, dot, suffix = entry.name.rpartition(".")
        if entry.stat is None or not dot or suffix not in ("json", "claim") or not _is_hex(stem):
            return Kind.FOREIGN, ""
        raw = read_small(self._root, Name(f"{places.NAMESPACES}/{entry.name}"), RECORD_BYTES_MAX)
        if raw is None:
            return None
        try:
            if suffix == "json":
                namespace = Namespace.from_json(raw)
                if namespace.digest.hex() != stem:
                    return Kind.BAD_RECORD, f"describes namespace {namespace.digest.hex()}"
                self.ids.add(namespace.id)
            else:
                fields = parse_json(raw)
                Layout.from_dict(fields["layout"])
                if claim_key(fields["tenant"], fields["name"]).hex() != stem:
                    return Kind.BAD_RECORD, f"claims {fields['name']!r} of tenant {fields['tenant']!r}"
        except (InvalidRequest, ValueError, KeyError, TypeError) as cause:
            return Kind.BAD_RECORD, str(cause)
        return None


def read_claim(root: Root, key: bytes) -> Layout | None:
    """The layout that a claim on the root names; None if there is no readable one. Raises the root's errors."""
    raw = read_small(root, places.namespace_claim(key), RECORD_BYTES_MAX)
    if raw is None:
        return None
    try:
        return Layout.from_dict(parse_json(raw)["layout"])
    except (InvalidRequest, ValueError, KeyError, TypeError):
        return None


def _is_hex(text: str) -> bool:
    try:
        return bool(bytes.fromhex(text))
    except ValueError:
        return False
