"""Namespaces as nodes agree on them: the layout that a tenant's name stands for, and its variants.

A name is claimed for one layout by compare-and-set. Other weights or settings under the same name are namespaces of
their own (another digest) and are recorded with it; another layout under the same name is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvstore.core.layout import Layout
from kvstore.core.namespace import Namespace, NamespaceDigest
from kvstore.core.validate import parse_json
from kvstore.errors import InvalidRequest, LayoutMismatch, RootMismatch, Unavailable
from kvstore.meta.keys import Keys
from kvstore.meta.store import TRIES_MAX, Absent, EtcdDeadline, MetadataStore, ModifiedAt, Put

VARIANTS_MAX = 1024


@dataclass(frozen=True, slots=True)
class _Claim:
    """The value under a name: its layout, and how many namespaces are recorded under it."""

    layout: Layout
    variants_count: int

    def to_json(self, namespace: Namespace) -> bytes:
        """Returns the stored form; tenant and name are for people who read the store."""
        fields = {
            "tenant": namespace.tenant,
            "name": namespace.name,
            "layout": self.layout.to_dict(),
            "variants": self.variants_count,
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, value: bytes) -> _Claim:
        fields = parse_json(value)
        return cls(Layout.from_dict(fields["layout"]), int(fields["variants"]))


class Namespaces:
    """The namespaces of one root."""

    def __init__(self, meta: MetadataStore, keys: Keys) -> None:
        self._meta = meta
        self._keys = keys

    def claim(self, namespace: Namespace, timeout_s: float | None = None) -> None:
        """Records ``namespace``; returns immediately if it is recorded already.

        Raises LayoutMismatch if its name stands for another layout, InvalidRequest over 1024 variants of one name,
        Unavailable if the store did not answer. May be repeated: a record that is found counts as
        success, so a lost reply needs no more than reading back.
        """
        deadline = EtcdDeadline(timeout_s)
        name_key = self._keys.namespace_name(namespace.tenant, namespace.name)
        digest_key = self._keys.namespace_digest(namespace.digest)
        tries_left = TRIES_MAX
        while True:
            if self._meta.get(digest_key, deadline.left_s()) is not None:
                return
            if deadline.over:
                raise Unavailable(
                    f"namespace {namespace.name!r} could not be claimed in time: the call may be repeated"
                )
            found = self._meta.get(name_key, deadline.left_s())
            if found is None:
                claim = _Claim(namespace.layout, 1)
                compare: Absent | ModifiedAt = Absent(name_key)
            else:
                before = _read(name_key, found.value)
                _check(namespace, before)
                claim = _Claim(before.layout, before.variants_count + 1)
                # Also increments the count, so that two variants recorded concurrently cannot exceed the limit.
                compare = ModifiedAt(name_key, found.mod_revision)
            puts = (Put(name_key, claim.to_json(namespace)), Put(digest_key, namespace.to_json()))
            try:
                self._meta.txn((compare, Absent(digest_key)), puts, deadline.left_s(0.6))
            except Unavailable:
                # Unknown outcome: the next round reads back, and the compares keep a late write from counting twice.
                tries_left -= 1
                if not tries_left or deadline.over:
                    raise

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


def _read(key: str, value: bytes) -> _Claim:
    try:
        return _Claim.from_json(value)
    except (ValueError, KeyError, TypeError) as cause:
        raise RootMismatch(f"{key} is not a namespace claim ({cause}): is this another version's store?") from cause


def _check(namespace: Namespace, claim: _Claim) -> None:
    if claim.layout != namespace.layout:
        raise LayoutMismatch(
            f"namespace {namespace.name!r} of tenant {namespace.tenant!r} exists with {claim.layout}, "
            f"but {namespace.layout} was asked for: use the existing layout, or another namespace name"
        )
    if claim.variants_count >= VARIANTS_MAX:
        raise InvalidRequest(
            f"namespace {namespace.name!r} of tenant {namespace.tenant!r} has {claim.variants_count} variants "
            f"(weights, attributes), the limit is {VARIANTS_MAX}: use another namespace name"
        )
