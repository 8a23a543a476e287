"""Namespaces on the root: which layout each name has, and what each digest in a chunk file means.

The records make chunk files understandable without etcd. Without etcd they are also the claims on names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator

from kvstore.buffers import Borrowed
from kvstore.errors import InvalidRequest, LayoutMismatch, RootMismatch
from kvstore.format import places
from kvstore.format.places import Name
from kvstore.layout import Layout
from kvstore.namespace import Namespace, NamespaceDigest
from kvstore.recency import NS_PER_S
from kvstore.root.interface import Root
from kvstore.sources import Clock
from kvstore.text import parse_json

RECORD_BYTES_MAX = 1 << 20


class NamespaceRecords:
    """The records of one root; called on lanes only."""

    def __init__(self, root: Root, session: Callable[[], bytes], numbers: Iterator[int], clock: Clock) -> None:
        self._root = root
        self._session = session
        self._numbers = numbers
        self._clock = clock

    def claim(self, namespace: Namespace) -> None:
        """Claims (tenant, name) for this layout, or confirms the claim, and records the namespace.

        First writer wins, as for chunks. Raises LayoutMismatch if the name has another layout already.
        """
        claim = json.dumps(
            {"name": namespace.name, "tenant": namespace.tenant, "layout": namespace.layout.to_dict()}, sort_keys=True
        ).encode()
        name = places.namespace_claim(claim_key(namespace.tenant, namespace.name))
        _check(namespace, name, self._write_once(name, claim))
        self._write_once(places.namespace_record(namespace.digest), namespace.to_json())

    def check(self, namespace: Namespace) -> None:
        """Raises LayoutMismatch if the name is claimed for another layout; claims nothing."""
        name = places.namespace_claim(claim_key(namespace.tenant, namespace.name))
        found = _read(self._root, name)
        if found is not None:
            _check(namespace, name, found)

    def find(self, digest: NamespaceDigest) -> Namespace | None:
        """Returns the namespace with this digest; None if this root has no readable record of it."""
        raw = _read(self._root, places.namespace_record(digest))
        try:
            namespace = None if raw is None else Namespace.from_json(raw)
        except InvalidRequest:
            return None  # fsck reports a damaged record; the next client of the namespace brings its description
        return namespace if namespace is not None and namespace.digest == digest else None

    def list(self) -> list[Namespace]:
        """Returns all namespaces recorded on this root, except unreadable records (``fsck`` names them)."""
        return read_namespaces(self._root)

    def _write_once(self, name: Name, record: bytes) -> bytes:
        """Writes ``record`` under ``name`` if there is none; returns the record that is there."""
        found = _read(self._root, name)
        if found is not None:
            return found
        staged = places.staged(self._session(), next(self._numbers))
        stamp = int(self._clock.now_s()) * NS_PER_S
        try:
            self._root.stage(staged, [memoryview(record)], stamp_ns=stamp, durable=True)
            self._root.publish(staged, name, durable=True)
        except BaseException:
            self._root.discard(staged)
            raise
        found = _read(self._root, name)
        return record if found is None else found


def read_namespaces(root: Root) -> list[Namespace]:
    """Returns all namespaces recorded on a root, except unreadable records. Raises the root's errors."""
    found = []
    for entry in root.list(places.NAMESPACES):
        if entry.stat is None or not entry.name.endswith(".json"):
            continue
        raw = _read(root, Name(f"{places.NAMESPACES}/{entry.name}"))
        try:
            if raw is not None:
                found.append(Namespace.from_json(raw))
        except InvalidRequest:
            continue
    return sorted(found, key=lambda each: (each.tenant, each.name, each.fingerprint, each.attributes))


def claim_key(tenant: str, name: str) -> bytes:
    """Digests tenant and name, for file names and keys, whatever their alphabet and length."""
    packed = json.dumps([tenant, name]).encode()
    return hashlib.blake2b(packed, digest_size=16, person=b"kvstore.claim.1").digest()


def _read(root: Root, name: Name) -> bytes | None:
    reader = root.open(name)
    if reader is None:
        return None
    with reader:
        raw = bytearray(min(reader.stat.size_bytes, RECORD_BYTES_MAX))
        count = reader.read([memoryview(raw)], 0, Borrowed())
        return bytes(raw[:count])


def _check(namespace: Namespace, name: Name, claim: bytes) -> None:
    existing = _layout_of(name, claim)
    if existing != namespace.layout:
        raise LayoutMismatch(
            f"namespace {namespace.name!r} (tenant {namespace.tenant!r}) exists with {existing}, "
            f"but {namespace.layout} was asked for: use the same layout, or another name"
        )


def _layout_of(name: Name, record: bytes) -> Layout:
    try:
        return Layout.from_dict(parse_json(record)["layout"])
    except (ValueError, KeyError, TypeError, InvalidRequest) as cause:
        raise RootMismatch(f"{name} on the root is damaged: run kvstore fsck --repair ({cause})") from cause
