"""Mutants of the C library: each of its checks, blind (kvstore/native, KV_CHECK), and each field of a header."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import blind

SAME = "native/test_same_results.py::test_each_damage_has_the_same_result"
IMAGES = "node/test_images.py::test_i1_what_is_wrong_is_not_taken"
FIELDS = "native/test_verifying.py::test_i1_an_image_whose_header_says_otherwise_is_not_taken"
PIECES = "native/test_verifying.py"

MUTANTS: list[Mutant] = [
    mutant("native-section-sum", "FORMAT: section checksum", blind("section_sum"), f"{SAME}[get-byte 4096]"),
    mutant("native-header-sum", "FORMAT: header checksum", blind("header_sum"), f"{SAME}[get-byte 4088]"),
]
