"""The namespace: everything that must be equal for the bytes of two engines to be interchangeable.

It is the security and correctness boundary: every address is keyed with its digest, so two namespaces share none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NewType

from kvstore.core.layout import Layout
from kvstore.core.validate import brief, check_text, kind_of, parse_json
from kvstore.errors import InvalidRequest

NamespaceDigest = NewType("NamespaceDigest", bytes)
NamespaceId = NewType("NamespaceId", bytes)
DIGEST_BYTES = 32

HASH_ALGORITHM = "blake2b-128"
NAME_BYTES_MAX = 256
TEXT_BYTES_MAX = 4096
ATTRIBUTES_MAX = 64


@dataclass(frozen=True)
class Namespace:
    """One model's KV, as one engine configuration writes it.

    ``name`` and ``tenant`` say whose it is; ``fingerprint`` is a digest of the weights; ``attributes`` are further
    settings that change the bytes (RoPE scaling, quantisation, parallel rank and size), as sorted text pairs.
    """

    name: str
    layout: Layout
    fingerprint: str = ""
    tenant: str = ""
    attributes: tuple[tuple[str, str], ...] = ()
    digest: NamespaceDigest = field(init=False, compare=False, repr=False)
    id: NamespaceId = field(init=False, compare=False, repr=False)
    """The first 8 bytes of the digest: a tag in file names, so that a listing distinguishes namespaces."""

    def __post_init__(self) -> None:
        for what, text, most in (
            ("name", self.name, NAME_BYTES_MAX),
            ("tenant", self.tenant, NAME_BYTES_MAX),
            ("fingerprint", self.fingerprint, TEXT_BYTES_MAX),
        ):
            check_text(f"namespace {what}", text, most)
        if not self.name:
            raise InvalidRequest("namespace name is empty: give the model's name")
        if not isinstance(self.layout, Layout):
            raise InvalidRequest(f"namespace layout={brief(self.layout)}: expected a kvstore.Layout")
        _check_attributes(self.attributes)
        object.__setattr__(self, "digest", NamespaceDigest(_digest(self)))
        object.__setattr__(self, "id", NamespaceId(self.digest[:8]))

    @classmethod
    def of(
        cls,
        name: str,
        layout: Layout,
        fingerprint: str = "",
        tenant: str = "",
        attributes: Mapping[str, str] | None = None,
    ) -> Namespace:
        """A namespace from what a user types; ``attributes`` in any order."""
        if attributes is not None and not isinstance(attributes, Mapping):
            raise InvalidRequest(f"attributes are {kind_of(attributes)}: expected a mapping of text to text")
        return cls(name, layout, fingerprint, tenant, tuple(sorted((attributes or {}).items(), key=str)))

    @property
    def short(self) -> str:
        """Its name, tenant and layout, for people."""
        tenant = f" of tenant {self.tenant!r}" if self.tenant else ""
        return f"{self.name!r}{tenant}, {self.layout.short}"

    def to_json(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces, UTF-8. The digest is taken over it."""
        return json.dumps(_fields(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Namespace:
        """The inverse of to_json. Raises InvalidRequest where ``text`` is not a namespace."""
        try:
            fields = parse_json(text)
            return cls(
                fields["name"],
                Layout.from_dict(fields["layout"]),
                fields["fingerprint"],
                fields["tenant"],
                tuple((str(key), str(value)) for key, value in fields["attributes"]),
            )
        except (ValueError, KeyError, TypeError) as cause:
            raise InvalidRequest(f"not a namespace record: {cause}") from cause


def _fields(namespace: Namespace) -> dict[str, Any]:
    return {
        "name": namespace.name,
        "tenant": namespace.tenant,
        "fingerprint": namespace.fingerprint,
        "layout": namespace.layout.to_dict(),
        "attributes": [list(pair) for pair in namespace.attributes],
        "address": HASH_ALGORITHM,
    }


def _digest(namespace: Namespace) -> bytes:
    return hashlib.blake2b(namespace.to_json(), digest_size=32, person=b"kvstore.ns.1").digest()


def _check_attributes(attributes: tuple[tuple[str, str], ...]) -> None:
    is_pairs = isinstance(attributes, tuple) and all(isinstance(each, tuple) and len(each) == 2 for each in attributes)
    if not is_pairs:
        raise InvalidRequest(
            f"namespace attributes={brief(attributes)}: expected a tuple of pairs of text; Namespace.of takes a mapping"
        )
    if len(attributes) > ATTRIBUTES_MAX:
        raise InvalidRequest(f"namespace has {len(attributes)} attributes, over the limit of {ATTRIBUTES_MAX}")
    for key, value in attributes:
        check_text("namespace attribute name", key, NAME_BYTES_MAX)
        check_text(f"namespace attribute {brief(key)}", value, TEXT_BYTES_MAX)
