"""The runner itself: what counts as caught, and that a mutant which does not fit the code is reported as such."""

from __future__ import annotations

import pytest

from tests.mutants.mutant import Mutant, mutant
from tests.mutants.planters import Edit, Target, Unplantable, edit, replace, several, skip
from tests.mutants.running import Ran, Verdict, judged

SOURCE = """
class Reader:
    @property
    def size(self):
        return self.bytes

    def read(self):
        if self.size > 3:
            raise ValueError
        return self.size


def read():
    return 3
"""
ROW = mutant("row", "a rule", skip("kvstore.module:function"), "module/test_file.py")


def ran(code: int | None, *notes: dict[str, object]) -> Ran:
    return Ran(code, list(notes), "the output")


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (ran(1, {"planted": "m"}, {"failed": "test", "late": False}), Verdict.CAUGHT),
        (ran(0, {"planted": "m"}, {"passed": "test"}), Verdict.SURVIVED),
        (ran(1, {"planted": "m"}), Verdict.BROKEN),
        (ran(0, {"planted": "m"}), Verdict.BROKEN),
        (ran(2, {"planted": "m"}), Verdict.BROKEN),
        (ran(4, {"planted": "m"}), Verdict.BROKEN),
        (ran(5, {"planted": "m"}), Verdict.BROKEN),
        (ran(None, {"planted": "m"}), Verdict.BROKEN),
        (ran(1, {"planted": "m"}, {"failed": "test", "late": True}), Verdict.BROKEN),
        (ran(1, {"failed": "test", "late": False}), Verdict.UNPLANTED),
        (ran(1, {"unplantable": "gone"}, {"failed": "test", "late": False}), Verdict.UNPLANTED),
    ],
    ids=[
        "a test failed",
        "all passed",
        "an error beside the tests",
        "nothing ran",
        "interrupted",
        "no such test",
        "no tests",
        "not ended",
        "a test that did not end",
        "not planted",
        "not plantable",
    ],
)
def test_a_mutant_is_caught_by_a_test_that_fails_and_by_nothing_else(result: Ran, verdict: Verdict) -> None:
    assert judged(ROW, result)[0] is verdict


def test_a_test_that_does_not_end_counts_where_the_table_says_so() -> None:
    row = Mutant("row", "a rule", ROW.planter, ROW.tests, may_time_out=True)
    assert judged(row, ran(None, {"planted": "m"}))[0] is Verdict.HUNG


def test_an_edit_changes_its_own_function_alone() -> None:
    changed = edit("m:Reader.read", "return self.size", "return 0").source("m", SOURCE)
    assert changed == SOURCE.replace("        return self.size\n", "        return 0\n")
    assert edit("m:read", "return 3", "return 4").source("m", SOURCE).endswith("return 4\n")
    both = several(edit("m:read", "3", "4"), edit("m:Reader.size", "self.bytes", "9"))
    assert "return 4" in both.source("m", SOURCE) and "return 9" in both.source("m", SOURCE)


@pytest.mark.parametrize(
    "planter",
    [edit("m:Reader.read", "self.size", "0"), edit("m:read", "return 5", ""), edit("m:Reader.gone", "a", "b")],
    ids=["there twice", "not there", "no such function"],
)
def test_an_edit_that_does_not_fit_is_refused(planter: Edit) -> None:
    with pytest.raises(Unplantable):
        planter.source("m", SOURCE)


@pytest.mark.parametrize("planter", [skip("m:Reader.gone"), replace("m:Gone.read", len)])
def test_a_function_that_is_gone_cannot_be_replaced(planter: Edit) -> None:
    with pytest.raises(Unplantable):
        planter.fits("m", SOURCE)
    skip("m:Reader.read").fits("m", SOURCE)
    assert Target.of("m:Reader.read") == Target("m", "Reader.read")
