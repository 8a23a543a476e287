"""A warm call enters no more files and functions of kvstore than the table has; see ``python -m tests.hops --help``.

The numbers may only fall.  A rise fails at once.  A fall in files, or in more functions than LEFT, fails too, with the
row to write: a table that nobody lowers would let the next change take back what this one gained.  Few functions do
not, because some run only where a thread is late (a wait, a wake-up), and a busy machine has more or fewer of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.native.library import is_available
from tests.hops.calls import WAYS, hops_by
from tests.hops.recording import Function, files_of
from tests.hops.table import Hops, read_table

pytestmark = pytest.mark.skipif(not is_available(), reason="the table is that of the native library")
LEFT = 6
TRIES = 6


def judged(found: set[Function], row: Hops) -> str:
    """Describes what is wrong with a call; empty if nothing is."""
    hops = Hops(len(files_of(found)), len(found))
    if hops.files > row.files or hops.functions > row.functions:
        entered = "\n    ".join(files_of(found))
        return f"now {hops}, more than the {row} of the table; it enters\n    {entered}"
    if hops.files < row.files or hops.functions < row.functions - LEFT:
        return f"now {hops}, fewer than the {row} of the table: run `python -m tests.hops --write`"
    return ""


@pytest.mark.parametrize(
    "way", [way if "embedded" in way else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_no_call_goes_farther_than_the_table_says(way: str, tmp_root: Path) -> None:
    rows, wrong = read_table()[way], {"": "no try was made"}
    for number in range(TRIES):
        # Again: threads that wait for each other more than they use to enter a few more functions.
        found = hops_by(way, tmp_root / str(number))
        assert found.keys() == rows.keys()
        wrong = {call: said for call, row in rows.items() if (said := judged(found[call], row))}
        if not wrong:
            break
    assert not wrong, "\n".join(f"{way}, {call}: {said}" for call, said in wrong.items())


def test_the_table_has_every_way() -> None:
    assert read_table().keys() == set(WAYS)


def test_a_rise_and_a_fall_are_found() -> None:
    row, path = Hops(2, 20), {(file, f"{file}{number}") for file in "ab" for number in range(10)}
    assert judged(path, row) == ""
    assert "more than" in judged({*path, ("c", "f")}, row)
    assert "more than" in judged({*path, ("a", "another")}, row)
    assert judged(path - {("a", "a0")}, row) == ""
    assert "fewer than" in judged({each for each in path if each[0] == "a"}, row)
    assert "fewer than" in judged({each for each in path if int(each[1][1]) < 5}, row)
