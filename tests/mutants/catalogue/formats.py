"""Bytes that are believed unverified: the format (kvstore/format/FORMAT.md), addresses, encodings, fsck."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.mutants.catalogue.interfaces import ROOT, at, giving
from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import several

HEADER = "kvstore.format.header"
VERIFY = "kvstore.codec.image"
CODEC = "kvstore.codec.codec"
SEAL = "kvstore.codec.codec:PartCipher"
READS = ("node/test_damage.py",)


def _field(name: str) -> Mutant:
    """A header that counts as the wanted one, whatever one of its fields says."""
    return mutant(
        f"header-{name}",
        at(
            HEADER,
            "matches",
            lambda real, header, expected: real(replace(header, **{name: getattr(expected, name)}), expected),
        ),
        "format/test_header.py",
    )


def _fixed(start: int, content: bytes) -> Any:
    """Decodes a header as if it had the right bytes from ``start`` on."""

    def decode(real: Any, header: Any) -> Any:
        raw = bytearray(header)
        raw[start : start + len(content)] = content
        return real(raw)

    return at(HEADER, "decode", decode)


def _any_header_sum(real: Any, header: Any) -> Any:
    from kvstore.format.header import checksum

    raw = bytearray(header)
    size = int.from_bytes(raw[16:20], "little")
    if 136 <= size <= len(raw):
        raw[size - 8 : size] = checksum(memoryview(raw)[: size - 8]).to_bytes(8, "little")
    return real(raw)


def _any_geometry(real: Any, header: Any, expected: Any) -> Any:
    from kvstore.format.header import decode, matches

    found = decode(header)
    return found if matches(found, expected) else real(header, expected)


def _damage_ignored(real: Any, *what: Any, **how: Any) -> Any:
    from kvstore.format.header import Damaged

    try:
        return real(*what, **how)
    except Damaged:
        return None


def _short_read_counts(real: Any, reader: Any, pieces: Any, offset: int, borrowed: Any) -> Any:
    reader.read(pieces, offset, borrowed)
    return sum(map(len, pieces))


def _opened_unverified(real: Any, self: Any, part: int, sealed: Any) -> Any:
    from kvstore.format.header import Damaged

    try:
        return real(self, part, sealed)
    except Damaged:
        return bytes(len(sealed) - 16)


def _without_file(real: Any, secret: bytes, salt: bytes, fixed: bytes) -> Any:
    return real(secret, salt, bytes(len(fixed)))


def _any_version(real: Any, cls: Any, content: bytes) -> Any:
    import json

    try:
        fields = json.loads(content)
    except ValueError:
        return real(cls, content)
    if isinstance(fields, dict) and isinstance(fields.get("version"), int):
        fields["version"] = 1
    return real(cls, json.dumps(fields).encode())


def _delete_the_damaged(real: Any, self: Any, source: str, name: str, **how: Any) -> Any:
    return self.remove(source) if name.startswith("quarantine/") else real(self, source, name, **how)


def _lose_the_intact(real: Any, self: Any, staged: str, name: str, **how: Any) -> Any:
    return False if staged.startswith("quarantine/") else real(self, staged, name, **how)


def _chain_by_tokens(real: Any, self: Any, namespace: Any, tokens: Any) -> Any:
    return _chains.setdefault(bytes(tokens), real(self, namespace, tokens))


_chains: dict[bytes, Any] = {}

PLAIN = [
    *(_field(name) for name in ("kind", "address", "parent", "namespace", "depth", "identity")),
    mutant("header-of-another-chunk", at(HEADER, "matches", giving(True)), *READS, native=False),
    mutant("header-magic", _fixed(0, b"\x93KVCHNK\n"), "format/test_header.py"),
    mutant("header-version", _fixed(8, b"\1\0"), "format/test_header.py"),
    mutant("header-algorithms", _fixed(10, b"\1\1"), "format/test_header.py"),
    mutant("header-checksum", at(HEADER, "decode", _any_header_sum), "format/test_header.py"),
    mutant("header-geometry", at(HEADER, "decode_as", _any_geometry), "format/test_header.py node/test_damage.py"),
    mutant("sections-unverified", at(VERIFY, "verify", giving(None)), *READS, native=False),
    mutant(
        "first-section-verified",
        at(VERIFY, "verify", lambda real, sections, sums: real(sections[:1], sums[:1])),
        *READS,
        native=False,
    ),
    mutant(
        "checksum-of-a-page",
        at("kvstore.format.header", "checksum", lambda real, content: real(memoryview(content)[:4096])),
        "format/test_golden.py",
        *READS,
        native=False,
    ),
    mutant("short-read-counts", at(VERIFY, "fill", _short_read_counts), *READS, native=False),
    mutant("views-unverified", at(VERIFY, "verify_whole", giving(None)), *READS, native=False),
    mutant(
        "layer-unverified",
        at(
            "kvstore.engine.chunk_store:ChunkStore",
            "read_range",
            lambda real, self, reader, header, expected, first, sections, borrowed: _read(
                reader, sections, header.header_bytes + first * expected.section_bytes, borrowed
            ),
        ),
        *READS,
        native=False,
    ),
    mutant("damage-stays", at("kvstore.engine.chunk_store:ChunkStore", "set_aside", giving(None)), *READS),
    mutant("w3-damaged-file-is-deleted", at(ROOT[:2], "move", _delete_the_damaged), "node/test_damage.py"),
    mutant("w3-intact-file-stays-in-quarantine", at(ROOT[:2], "publish", _lose_the_intact), "node/test_damage.py"),
    mutant(
        "chain-of-another-namespace",
        at("kvstore.format.keyset:RecentChains", "of", _chain_by_tokens),
        "node/test_chains.py",
    ),
    mutant(
        "namespace-ignores-tenants",
        at(
            "kvstore.core.namespace:Namespace",
            "of",
            lambda real, cls, name, layout, fingerprint="", tenant="", *rest, **how: real(
                cls, name, layout, fingerprint, "", *rest, **how
            ),
        ),
        "format/test_addresses.py",
    ),
    mutant(
        "root-any-version", at("kvstore.root.identity:RootIdentity", "from_json", _any_version), "root/test_identity.py"
    ),
    mutant("fsck-believes-addresses", at(HEADER, "is_self_consistent", giving(True)), "fsck/test_fsck.py"),
]


def _read(reader: Any, sections: Any, offset: int, borrowed: Any) -> None:
    reader.read(sections, offset, borrowed)


ENCODINGS = [
    mutant(
        "encoded-header-of-another-chunk",
        at(CODEC, "decode_header", lambda real, raw, expected: _decode_encoded(raw)),
        "encodings/test_codec.py",
    ),
    mutant("encoded-damage-ignored", at(f"{CODEC}:Decoding", "section", _damage_ignored), "encodings/test_codec.py"),
    mutant("seal-tag-ignored", at(SEAL, "open", _opened_unverified), "encodings/test_codec.py"),
    mutant(
        "seal-of-any-place",
        several(
            at(SEAL, "close", lambda real, self, part, plain: real(self, 0, plain)),
            at(SEAL, "open", lambda real, self, part, sealed: real(self, 0, sealed)),
        ),
        "encodings/test_codec.py",
    ),
    mutant("seal-of-any-file", at("kvstore.codec.codec", "PartCipher", _without_file), "encodings/test_codec.py"),
    mutant(
        "encrypted-files-are-mapped",
        at("kvstore.codec.encodings:Encodings", "encrypts", giving(False)),
        "encodings/test_node.py",
    ),
    mutant(
        "disk-has-plain-text",
        at("kvstore.codec.encodings:Encodings", "pieces_of_image", lambda real, self, header, image: [image]),
        "encodings/test_node.py",
    ),
]


def _decode_encoded(raw: Any) -> Any:
    from kvstore.format.header import decode_encoded

    return decode_encoded(raw)


MUTANTS: list[Mutant] = [*PLAIN, *ENCODINGS]
