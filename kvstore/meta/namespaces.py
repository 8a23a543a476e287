"""Namespaces as nodes agree on them: the layout that a tenant's name stands for, and its variants.

A name is claimed for one layout: the first. Other weights or settings under the same name are namespaces of
their own (another digest) and are recorded with it; another layout under the same name is refused.
"""

from __future__ import annotations

import json

from kvstore.core.layout import Layout
from kvstore.core.namespace import Namespace, NamespaceDigest
from kvstore.core.validate import parse_json
from kvstore.errors import LayoutMismatch, RootMismatch
from kvstore.meta.cluster import put_first
from kvstore.meta.keys import Keys
from kvstore.meta.store import EtcdDeadline, MetadataStore


class Namespaces:
    """The namespaces of one root."""

    def __init__(self, meta: MetadataStore, keys: Keys) -> None:
        self._meta = meta
        self._keys = keys

    def claim(self, namespace: Namespace, timeout_s: float | None = None) -> None:
        """Records ``namespace``; returns immediately if it is recorded already.

        Raises LayoutMismatch if its name stands for another layout, Unavailable if the store did not answer. May be
        repeated: a record that is found counts as success, so a lost reply needs no more than reading back.
        """
        deadline, what = EtcdDeadline(timeout_s), f"namespace {namespace.name!r}"
        digest_key = self._keys.namespace_digest(namespace.digest)
        if self._meta.get(digest_key, deadline.left_s()) is not None:
            return
        name_key = self._keys.namespace_name(namespace.tenant, namespace.name)
        # Tenant and name are for people who read the store.
        claim = {"tenant": namespace.tenant, "name": namespace.name, "layout": namespace.layout.to_dict()}
        value = json.dumps(claim, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        claimed = _claimed(name_key, put_first(self._meta, name_key, value, deadline, what))
        if claimed != namespace.layout:
            raise LayoutMismatch(
                f"namespace {namespace.name!r} of tenant {namespace.tenant!r} exists with {claimed}, "
                f"but {namespace.layout} was asked for: use the existing layout, or another namespace name"
            )
        put_first(self._meta, digest_key, namespace.to_json(), deadline, what)

    def list(self, timeout_s: float | None = None) -> tuple[Namespace, ...]:
        """Returns all recorded namespaces, by tenant and name."""
        items = self._meta.list(self._keys.namespace_digests, timeout_s).items
        found = [Namespace.from_json(kv.value) for kv in items]
        return tuple(sorted(found, key=lambda one: (one.tenant, one.name, one.digest)))

    def find(self, digest: NamespaceDigest, timeout_s: float | None = None) -> Namespace | None:
        """Returns the namespace with this digest; None if none is recorded.

        Raises RootMismatch if the record does not match its key (a damaged or foreign store).
        """
        found = self._meta.get(self._keys.namespace_digest(digest), timeout_s)
        if found is None:
            return None
        namespace = Namespace.from_json(found.value)
        if namespace.digest != digest:
            raise RootMismatch(
                f"the record of namespace {digest.hex()} has digest {namespace.digest.hex()}: "
                "the metadata store is damaged or of another version"
            )
        return namespace


def _claimed(key: str, value: bytes) -> Layout:
    try:
        return Layout.from_dict(parse_json(value)["layout"])
    except (ValueError, KeyError, TypeError) as cause:
        raise RootMismatch(f"{key} is not a namespace claim ({cause}): is this another version's store?") from cause
