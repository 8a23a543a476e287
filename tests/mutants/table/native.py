"""Mutants of the C library: each of its checks blind (kvstore/native, KV_CHECK), and each field of a header."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import blind, blind_field, edit

HERE = "native/test_verifying.py::test_"
FILE = f"{HERE}i1_a_file_with_a_bit_turned_in_any_piece_is_not_read"
LAYER = f"{HERE}i1_a_layer_with_a_bit_turned_in_any_piece_is_not_read"
SAME = "native/test_same_results.py::test_each_damage_has_the_same_result"
IMAGE = "node/test_images.py::test_i1_what_is_wrong_is_not_taken"
SOCKET = "native/test_sockets.py::test_"
STAGED = "tiers/test_writing.py::test_i1_what_goes_wrong_before_native_code_stages_it_gets_no_name"


def check(name: str, rule: str, *tests: str) -> Mutant:
    """A row for one check."""
    return mutant(f"native-{name.replace('_', '-')}", rule, blind(name), *tests)


def field(name: str, first: int, size: int) -> Mutant:
    """A row for one field of a header."""
    test = f"{HERE}i1_an_image_whose_header_says_otherwise_is_not_taken"
    return mutant(f"native-field-{name.replace(' ', '-')}", f"FORMAT 4.3: {name}", blind_field(name, first, size), test)


HEADERS = [
    field("magic", 0, 8),
    field("version", 8, 2),
    field("algorithms", 10, 2),
    field("kind", 12, 1),
    field("header bytes", 16, 4),
    field("depth", 20, 4),
    field("identity bytes", 24, 4),
    field("section count", 28, 4),
    field("section bytes", 32, 8),
    field("address", 40, 16),
    field("parent", 56, 16),
    field("namespace", 72, 32),
    check(
        "header_identity",
        "FORMAT 4.3: tokens",
        f"{HERE}i1_an_image_whose_header_says_otherwise_is_not_taken",
    ),
    check("header_sum", "FORMAT 4.3: header checksum", f"{SAME}[get]", f"{IMAGE}[native]"),
]

READING = [
    check("section_sum", "FORMAT 4.3: section checksum", f"{SAME}[get]"),
    check("sum_of_pieces", "FORMAT 4.3: checksum of a section in pieces", f"{FILE}[pieces]"),
    check("file_header", "FORMAT 4.3: header of a file", f"{SAME}[get]"),
    check("file_first_piece", "FORMAT 4.3: first piece of a file", f"{SAME}[get]"),
    check("file_later_piece", "FORMAT 4.3: later pieces of a file", f"{FILE}[pieces]"),
    check("straight_header", "FORMAT 4.3: header of a file", f"{HERE}i1_another_chunks_file_is_not_read[straight]"),
    check("straight_sums", "FORMAT 4.3: sections of a file", f"{FILE}[straight]"),
    mutant(
        "native-straight-sums-of-layers",
        "FORMAT 4.3: sections of a layer",
        blind("straight_sums"),
        f"{LAYER}[straight]",
    ),
    check("opened_size", "FORMAT 4.3: size of a file", f"{HERE}i1_a_file_of_another_size_is_neither_opened_nor_found"),
    check("read_in_full", "FORMAT 4.3: a short read", f"{HERE}i1_a_file_that_is_cut_after_it_was_opened_is_not_read"),
    check(
        "parts_header",
        "FORMAT 4.3: header before layers",
        f"{HERE}i1_parts_of_a_file_with_another_header_are_not_opened",
    ),
    check(
        "part_first_piece",
        "FORMAT 4.3: first piece of a layer",
        "node/test_damage.py::test_damage_in_a_layer_ends_the_layers_there[one by one]",
    ),
    check("part_later_piece", "FORMAT 4.3: later pieces of a layer", f"{LAYER}[pieces]"),
    check(
        "taken_header",
        "FORMAT 4.3: header of a cold file",
        f"{HERE}i1_a_file_that_comes_in_pieces_is_verified_as_it_comes",
    ),
    check(
        "taken_sum",
        "FORMAT 4.3: sections of a cold file",
        f"{HERE}i1_a_file_that_comes_in_pieces_is_verified_as_it_comes",
    ),
]

MEMORY = [
    check("image_header", "MEMORY I1: header of an image", f"{IMAGE}[native]"),
    check("image_sum", "MEMORY I1: sections of an image", f"{IMAGE}[native]"),
    check(
        "image_table_header",
        "MEMORY I1: header of an image before layers",
        f"{HERE}i1_parts_of_an_image_with_another_header_are_not_taken",
    ),
    check(
        "image_part_sum",
        "MEMORY I1: layers of an image",
        f"{HERE}i1_parts_of_an_image_with_a_bit_turned_are_not_taken",
    ),
    check(
        "maps_bounded",
        "limits: mapped files",
        "native/test_mapped_views.py::test_more_than_may_be_mapped_are_copies",
    ),
]

SOCKETS = [
    check(
        "received_header",
        "MEMORY I1: header of a received chunk",
        f"{SOCKET}the_chunk_of_another_index_is_not_taken",
    ),
    check(
        "received_sum",
        "MEMORY I1: sections of a received chunk",
        f"{SOCKET}i1_a_bit_that_turned_on_the_way_is_noticed_wherever_it_is[tiny]",
    ),
]

WITHDRAWING = [
    check(
        "withdrawn",
        "FORMAT 4.3: memory that was taken back",
        "native/test_withdrawing.py::test_a_group_of_files_is_given_up_between_two_of_them",
    ),
    check(
        "not_stopped",
        "FORMAT 4.3: memory that is being taken back",
        "native/test_withdrawing.py::test_a_group_of_files_is_given_up_between_two_of_them",
    ),
    check(
        "files_bounded",
        "limits: files open at once",
        "native/test_limits_of_runs.py::test_a_lane_that_reads_what_is_not_cached_opens_no_more_files_than_it_may",
    ),
    check("path_fits", "limits: length of a path", f"{HERE}a_root_whose_name_is_too_long_is_left_to_python"),
]

WRITING = [
    check(
        "staged_image_header",
        "MEMORY I1: header of an image that is written to the root",
        f"{STAGED}[header]",
    ),
    check(
        "staged_image_sums",
        "MEMORY I1: sections of an image that is written to the root",
        f"{STAGED}[section]",
    ),
    check(
        "looked_size",
        "FORMAT 4.3: size of what a put finds",
        f"{HERE}i1_a_file_of_another_size_is_neither_opened_nor_found",
    ),
    mutant(
        "native-absence-is-always-believed",
        "a file that a client of NFS believes absent is looked for again",
        edit("kvstore.node.chunk_runs:ChunkRuns.present", "if self._files.knows_absence:", "if True:"),
        "native/test_looks.py::test_absence_is_believed_only_where_it_is_certain",
    ),
    check("staged_whole", "FORMAT W1: a file is staged whole", f"{HERE}a_put_that_could_not_be_written_leaves_nothing"),
    check(
        "put_goes_on",
        "a put that was given up publishes nothing that it staged afterwards",
        "native/test_interrupts.py::test_an_interrupted_put_of_blocks_stores_nothing_that_came_later[native]",
    ),
]

MUTANTS: list[Mutant] = [*HEADERS, *READING, *MEMORY, *SOCKETS, *WITHDRAWING, *WRITING]
