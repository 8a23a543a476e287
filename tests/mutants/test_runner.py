"""The runner itself: results that count as caught, and mutants that no longer fit the code."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from tests.kit.patience import PATIENCE_S
from tests.mutants.catalogue.interfaces import at, giving
from tests.mutants.mutant import mutant
from tests.mutants.planters import Unplantable
from tests.mutants.running import Ran, Verdict, judged

SOURCE = """
class Reader:
    bytes = 3

    @property
    def size(self):
        return self.bytes

    @classmethod
    def of(cls, size):
        return cls()

    def read(self, count):
        return count


def read(count):
    return count


checksum = read
"""
ROW = mutant("row", at("kvstore.module", "function", giving(None)), "module/test_file.py")


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
        "an error without a failed test",
        "no test ran",
        "interrupted",
        "no such test",
        "no tests",
        "timed out",
        "a test timed out",
        "not planted",
        "not plantable",
    ],
)
def test_mutant_is_caught_by_a_failed_test_alone(result: Ran, verdict: Verdict) -> None:
    assert judged(ROW, result)[0] is verdict


@pytest.fixture
def module() -> Any:
    made = ModuleType("m")
    exec(SOURCE, made.__dict__)
    return made


@pytest.mark.parametrize(("place", "name"), [("m:Reader", "gone"), ("m:Gone", "read"), ("m", "gone")])
def test_place_that_no_longer_exists_is_refused(module: Any, place: str, name: str) -> None:
    planter = at(place, name, giving(None))
    with pytest.raises(Unplantable):
        planter.fits("m", SOURCE)
    with pytest.raises(Unplantable):
        planter.plant(module)


def test_private_place_is_refused() -> None:
    with pytest.raises(AssertionError):
        at("m:Reader", "_read", giving(None))


def test_catalogue_is_read_without_importing_kvstore() -> None:
    """A module that the catalogue imports is there before a mutant can be planted in it."""
    program = "from tests.mutants.catalogue import all_mutants; all_mutants(); sys.exit('kvstore' in sys.modules)"
    subprocess.run([sys.executable, "-c", f"import sys; {program}"], timeout=PATIENCE_S, check=True)
