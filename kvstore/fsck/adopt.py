"""Telling an empty or restored etcd what the root knows: losing the metadata is not losing the data.

Chunk files and namespace records describe themselves; of all that etcd holds, only namespaces have to be rebuilt.
Sessions, pins and locks belong to processes, which make them again.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import InvalidRequest, LayoutMismatch
from kvstore.format import places
from kvstore.format.places import Name
from kvstore.fsck.records import read_claim
from kvstore.meta.interface import Meta
from kvstore.meta.keys import Keys
from kvstore.meta.namespaces import Namespaces
from kvstore.namespace import Namespace
from kvstore.node.namespaces import RECORD_BYTES_MAX, claim_key
from kvstore.root.identity import RootIdentity, read_small
from kvstore.root.interface import Root


@dataclass(frozen=True, slots=True)
class Adopted:
    """What came of it: namespaces that etcd has now and did not have, that it had, and names of records left out."""

    added_count: int
    known_count: int
    refused: tuple[str, ...]
    """Why a record was left out: unreadable, or its name stands for another layout."""


def adopt(root: Root, identity: RootIdentity, meta: Meta, *, timeout_s: float | None = None) -> Adopted:
    """Records every namespace of the root in ``meta``; may be repeated. ``timeout_s`` is for each call.

    Raises the root's errors, Unavailable and PermissionDenied of the metadata store.
    """
    namespaces = Namespaces(meta, Keys(identity.root))
    added = known = 0
    refused: list[str] = []
    for name, namespace in _records(root, refused):
        try:
            if namespaces.find(namespace.digest, timeout_s) is not None:
                known += 1
                continue
            namespaces.claim(namespace, timeout_s)
        except LayoutMismatch as error:
            refused.append(f"{name}: {error}")
        else:
            added += 1
    return Adopted(added, known, tuple(refused))


def _records(root: Root, refused: list[str]) -> list[tuple[Name, Namespace]]:
    """The readable records, those first whose layout the root's own claim names: etcd keeps the first of a name."""
    found = []
    for entry in root.list(places.NAMESPACES):
        name = Name(f"{places.NAMESPACES}/{entry.name}")
        if entry.stat is None or not entry.name.endswith(".json"):
            continue
        raw = read_small(root, name, RECORD_BYTES_MAX)
        if raw is None:
            continue
        try:
            namespace = Namespace.from_json(raw)
        except InvalidRequest as error:
            refused.append(f"{name}: {error}")
            continue
        if namespace.digest.hex() != entry.name.removesuffix(".json"):
            refused.append(f"{name}: describes namespace {namespace.digest.hex()}")
            continue
        claimed = read_claim(root, claim_key(namespace.tenant, namespace.name))
        found.append((claimed != namespace.layout, name, namespace))
    return [(name, namespace) for _, name, namespace in sorted(found, key=lambda record: record[:2])]
