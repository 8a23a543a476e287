"""Mutants of Python's verification of chunk files and roots, and of fsck's findings."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import edit, replace, skip

HEADER = "format/test_header.py::test_"
REASONS = f"{HEADER}each_reason_is_told_apart"
FIELDS = f"{HEADER}every_field_of_the_identity_counts"
DAMAGE = "node/test_damage.py::test_"
LARGE = "node/test_verifying.py::test_"
IMAGES = "node/test_images.py::test_"
FSCK = "fsck/test_fsck.py::test_"
IDENTITY = "root/test_identity.py::test_"

DECODE = "kvstore.format.header:decode"
MATCHES = "kvstore.format.header:matches"


def unmatched(field: str) -> Mutant:
    """A header whose ``field`` may be any."""
    return mutant(
        f"header-{field}",
        f"FORMAT 4.3: {field}",
        edit(MATCHES, f"header.{field} == expected.{field}", "True"),
        FIELDS,
    )


HEADERS = [
    mutant("header-magic", "FORMAT 4.3: magic", edit(DECODE, "if magic != MAGIC:", "if False:"), REASONS),
    mutant("header-version", "FORMAT 4.3: version", edit(DECODE, "if version != VERSION:", "if False:"), REASONS),
    mutant(
        "header-algorithms",
        "FORMAT 4.3: algorithms",
        edit(DECODE, "if algorithms != [XXH3_64, BLAKE2B_128] or", "if"),
        REASONS,
    ),
    mutant(
        "header-geometry",
        "FORMAT 4.3: geometry",
        edit(DECODE, "if size != header_bytes(identity_bytes, section_count) or size > len(header):", "if False:"),
        REASONS,
    ),
    mutant(
        "header-bounded",
        "FORMAT 4.3: a header is no larger than what was read",
        edit(DECODE, "or size > len(header)", ""),
        f"{HEADER}a_header_of_several_pages_truncated_at_any_page_is_damage",
    ),
    mutant(
        "header-checksum",
        "FORMAT 4.3: header checksum",
        edit(DECODE, "!= checksum(view[: size - _SUM.size])", "is None"),
        REASONS,
    ),
    *map(unmatched, ("kind", "address", "parent", "namespace", "depth", "identity")),
    mutant(
        "header-not-matched",
        "FORMAT 4.3: the chunk that was asked for",
        edit("kvstore.format.header:decode_as", "if not matches(found, expected):", "if False:"),
        FIELDS,
    ),
]


CHUNKS = [
    mutant(
        "chunks-section-checksum",
        "FORMAT 4.3: section checksum",
        skip("kvstore.node.verify:verify"),
        f"{LARGE}i1_a_bit_that_turned_anywhere_in_a_large_chunk_is_never_read[4096]",
        native=False,
    ),
    mutant(
        "chunks-short-read",
        "FORMAT 4.3: size",
        edit(
            "kvstore.node.verify:fill",
            "if reader.read(pieces, offset, borrowed) != wanted:",
            "if not reader.read(pieces, offset, borrowed):",
        ),
        "node/test_verifying.py::test_i1_a_file_that_is_cut_while_it_is_read_is_not_taken",
        native=False,
    ),
    mutant(
        "chunks-whole-first-run",
        "FORMAT 4.3: every section of a chunk over 4 MiB",
        edit(
            "kvstore.node.verify:verify_whole",
            "range(0, expected.section_count, run)",
            "range(0, min(run, expected.section_count), run)",
        ),
        f"{LARGE}i1_a_bit_that_turned_anywhere_in_a_large_chunk_is_in_no_view",
    ),
    mutant(
        "chunks-read-first-run",
        "FORMAT 4.3: every section of a chunk over 4 MiB",
        edit("kvstore.node.verify:read_verified", "        verify(part,", "        start or verify(part,"),
        f"{LARGE}i1_a_bit_that_turned_anywhere_in_a_large_chunk_is_never_read",
    ),
    mutant(
        "chunks-range-unverified",
        "FORMAT 4.3: checksum of ranges",
        edit("kvstore.node.chunks:Chunks.read_range", "verify(", "(lambda *_: None)("),
        f"{LARGE}i1_a_bit_that_turned_in_a_late_layer_is_in_no_layer",
    ),
    mutant(
        "chunks-view-unverified",
        "FORMAT 4.3: views are verified first",
        edit("kvstore.node.chunks:Chunks.map", "verify_whole(reader, expected)", "pass"),
        f"{LARGE}i1_a_bit_that_turned_anywhere_in_a_large_chunk_is_in_no_view",
    ),
    mutant(
        "chunks-size-ignored",
        "FORMAT 4.3: size of what is found",
        edit(
            "kvstore.node.chunks:Chunks.look",
            "stat.size_bytes != expected.file_bytes and not self._is_encoded(expected)",
            "False",
        ),
        f"{DAMAGE}each_length_truncated_is_a_miss_and_repaired",
        native=False,
    ),
    mutant(
        "chunks-damage-stays",
        "FORMAT 4.3: damage is set aside",
        skip("kvstore.node.quarantine:Quarantine.set_aside"),
        f"{DAMAGE}views_verify_before_they_are_handed_out",
        f"{DAMAGE}damage_in_the_middle_ends_the_prefix_there",
    ),
    mutant(
        "chunks-aside-always-intact",
        "FORMAT 4.3: what was set aside is verified again",
        replace("kvstore.node.quarantine:Quarantine._is_intact", lambda self, name, expected: True),
        f"{LARGE}i1_a_bit_that_turned_anywhere_in_a_large_chunk_is_never_read[4096]",
    ),
    mutant(
        "chunks-withdrawn-is-damage",
        "FORMAT 4.3: memory that was taken back is no damage",
        edit("kvstore.node.chunks:Chunks.read", "borrowed.check()  # the", "pass  # the"),
        f"{DAMAGE}memory_that_was_taken_back_while_it_was_verified_is_no_damage",
    ),
    mutant(
        "borrowed-writes-after-withdraw",
        "FORMAT 4.3: no byte is written to memory that was taken back",
        edit("kvstore.buffers:Borrowed.__enter__", "if self._withdrawn:", "if False:"),
        f"{IMAGES}memory_that_was_taken_back_is_not_written_to[python]",
    ),
]


INSPECTING = [
    mutant(
        "inspect-payload",
        "fsck: checksums of the payload",
        edit("kvstore.root.inspect:Inspector._payload", "if state.intdigest() != expected.checksum:", "if False:"),
        f"{FSCK}a_damaged_chunk_is_found_with_its_reason_and_set_aside",
    ),
    mutant(
        "inspect-size",
        "fsck: size of a file",
        edit(
            "kvstore.root.inspect:Inspector._look_once", "if header.file_bytes != reader.stat.size_bytes:", "if False:"
        ),
        f"{FSCK}a_damaged_chunk_is_found_with_its_reason_and_set_aside",
    ),
    mutant(
        "inspect-consistent",
        "fsck: address, namespace and tokens belong together",
        replace("kvstore.format.header:is_self_consistent", lambda header: True),
        "fsck/test_fsck.py::test_a_header_whose_tokens_are_not_those_of_its_address_is_damage",
    ),
    mutant(
        "inspect-short-file",
        "fsck: a file that ends early",
        edit("kvstore.root.inspect:Inspector._payload", "raise Damaged(Damage.SIZE)", "return"),
        "fsck/test_fsck.py::test_a_file_that_is_cut_while_it_is_read_is_damage",
    ),
    mutant(
        "root-follows-links",
        "FORMAT 1: what a link leads to is not ours",
        edit("kvstore.root.posix:PosixRoot.open", " | os.O_NOFOLLOW", ""),
        "root/test_posix.py::test_what_is_no_file_under_a_chunks_name_is_missing_and_stops_nobody",
    ),
    mutant(
        "quarantine-restores-damage",
        "PROTOCOL W3: a damaged file gets no name",
        edit("kvstore_gc.quarantine:Quarantine._looked_at", "if isinstance(verdict, Whole):", "if True:"),
        "gc/test_orphans.py::test_a_damaged_file_is_kept_for_a_day",
    ),
]


ROOTS = [
    mutant(
        "format-version",
        "FORMAT 2: version of a root",
        edit("kvstore.root.identity:RootIdentity.from_json", "if version != VERSION:", "if False:"),
        f"{IDENTITY}another_version_is_refused_and_named",
    ),
    mutant(
        "format-name",
        "FORMAT 2: format of a root",
        edit(
            "kvstore.root.identity:RootIdentity.from_json",
            "if name != FORMAT_NAME or type(version) is not int:",
            "if type(version) is not int:",
        ),
        f"{IDENTITY}a_wrong_field_is_refused",
    ),
    mutant(
        "format-fields",
        "FORMAT 2: fields in range",
        edit("kvstore.root.identity:RootIdentity.from_json", "if not sound:", "if False:"),
        f"{IDENTITY}a_wrong_field_is_refused",
    ),
    mutant(
        "root-any-id",
        "FORMAT 2: the root that was expected",
        edit("kvstore.root.identity:create_or_open", "if expect is not None and found.root != expect:", "if False:"),
        f"{IDENTITY}the_expected_root_is_opened_and_another_is_refused",
    ),
    mutant(
        "root-empty-mount-point",
        "FORMAT 2: an empty mount point is no place for a new root",
        edit("kvstore.root.identity:create_or_open", "if found is None and expect is not None:", "if False:"),
        f"{IDENTITY}an_empty_mount_point_is_refused_where_a_root_is_expected_and_nothing_is_made",
    ),
    mutant(
        "root-over-other-things",
        "FORMAT 2: a folder with other things is no root",
        replace("kvstore.root.identity:_foreign_entry", lambda root: None),
        f"{IDENTITY}a_folder_with_other_things_is_no_place_for_a_root",
    ),
    mutant(
        "namespace-two-layouts",
        "FORMAT 3: one layout under a name",
        replace("kvstore.node.namespaces:NamespaceRecords.check", lambda self, namespace: None),
        "node/test_put.py::test_another_layout_under_the_same_name_is_refused_with_both_named",
    ),
    mutant(
        "pin-checksum",
        "PROTOCOL C5: a damaged pin is refused",
        edit("kvstore.meta.pins:PinRecord.from_bytes", 'raise ValueError("its checksum is wrong")', "pass"),
        "meta/test_pins.py::test_a_record_that_lost_or_changed_an_address_is_refused",
    ),
]


MUTANTS: list[Mutant] = [*HEADERS, *CHUNKS, *INSPECTING, *ROOTS]
