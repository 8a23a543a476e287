"""A warm call enters no more files and functions of kvstore than the table has; see ``python -m tests.hops --help``.

A rise fails; after a fall `python -m tests.hops --write` lowers the table.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.native.library import is_available
from tests.hops.calls import WAYS, hops_by
from tests.hops.recording import Function, files_of
from tests.hops.table import Hops, read_table

pytestmark = pytest.mark.skipif(not is_available(), reason="the table is that of the native library")
TRIES = 6


def judged(found: set[Function], row: Hops) -> str:
    """Describes what is wrong with a call; empty if nothing is."""
    hops = Hops(len(files_of(found)), len(found))
    if hops.files > row.files or hops.functions > row.functions:
        entered = "\n    ".join(files_of(found))
        return f"now {hops}, more than the {row} of the table; it enters\n    {entered}"
    return ""


@pytest.mark.parametrize(
    "way", [way if "embedded" in way else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_no_call_goes_farther_than_the_table_says(way: str, tmp_root: Path) -> None:
    rows = read_table()[way]
    wrong = dict.fromkeys(rows, "not tried")
    for number in range(TRIES):
        # Again: threads that wait for each other more than they use to enter a few more functions.
        found = hops_by(way, tmp_root / str(number))
        assert found.keys() == rows.keys()
        wrong = {call: why for call in wrong if (why := judged(found[call], rows[call]))}
        if not wrong:
            break
    assert not wrong, "\n".join(f"{way}, {call}: {why}" for call, why in wrong.items())


def test_the_table_has_every_way() -> None:
    assert read_table().keys() == set(WAYS)


def test_rise_in_files_or_functions_is_found() -> None:
    row, path = Hops(2, 20), {(file, f"{file}{number}") for file in "ab" for number in range(10)}
    assert judged(path, row) == judged(path - {("a", "a0")}, row) == ""
    assert "more than" in judged({*path, ("c", "f")}, row)
    assert "more than" in judged({*path, ("a", "another")}, row)
