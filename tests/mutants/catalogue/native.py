"""The C library with one check blind (kvstore/native, KV_CHECK), or one field of a header not compared."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import blind, blind_field

VERIFYING = "native/test_verifying.py"
IMAGES = "node/test_images.py"
PARITY = "contract/test_parity_files.py"
WITHDRAWING = "native/test_withdrawing.py"
WRITING = ("tiers/test_writing.py", "-k", "native_code_stages")

FIELDS = {
    "magic": (0, 8),
    "version": (8, 2),
    "algorithms": (10, 2),
    "kind": (12, 1),
    "header bytes": (16, 4),
    "depth": (20, 4),
    "identity bytes": (24, 4),
    "section count": (28, 4),
    "section bytes": (32, 8),
    "address": (40, 16),
    "parent": (56, 16),
    "namespace": (72, 32),
}

CHECKS: dict[str, tuple[str, ...]] = {
    "header_identity": (VERIFYING,),
    "header_sum": (PARITY, IMAGES),
    "section_sum": (PARITY,),
    "sum_of_pieces": (VERIFYING,),
    "file_header": (PARITY,),
    "file_first_piece": (PARITY,),
    "file_later_piece": (VERIFYING,),
    "straight_header": (VERIFYING,),
    "straight_sums": (VERIFYING,),
    "opened_size": (VERIFYING,),
    "read_in_full": (VERIFYING,),
    "parts_header": (VERIFYING,),
    "part_first_piece": ("node/test_damage.py",),
    "part_later_piece": (VERIFYING,),
    "taken_header": (VERIFYING,),
    "taken_sum": (VERIFYING,),
    "image_header": (IMAGES,),
    "image_sum": (IMAGES,),
    "image_table_header": (VERIFYING,),
    "image_part_sum": (VERIFYING,),
    "maps_bounded": ("native/test_mapped_views.py",),
    "received_header": ("native/test_sockets.py",),
    "received_sum": ("native/test_sockets.py",),
    "withdrawn": (WITHDRAWING,),
    "not_stopped": (WITHDRAWING,),
    "files_bounded": ("native/test_limits_of_runs.py",),
    "path_fits": (VERIFYING,),
    "staged_image_header": WRITING,
    "staged_image_sums": WRITING,
    "looked_size": (VERIFYING,),
    "staged_whole": (VERIFYING,),
    "put_goes_on": (WITHDRAWING,),
}


MUTANTS: list[Mutant] = [
    *(
        mutant(f"native-{name.replace(' ', '-')}", blind_field(name, *place), "native/test_verifying.py")
        for name, place in FIELDS.items()
    ),
    *(mutant(f"native-{name.replace('_', '-')}", blind(name), *tests) for name, tests in CHECKS.items()),
]
