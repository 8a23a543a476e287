"""Pytest's part in a run with a mutant: plants the simulation's bugs, and notes which test failed, and how."""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest
from hypothesis import Phase, settings

from tests.mutants.finding import named
from tests.mutants.mutant import NAME_VARIABLE
from tests.mutants.planters import Simulated
from tests.mutants.planting import note

_planted = ExitStack()
# A failure is enough: to shrink its example takes minutes. tests/conftest.py loads the profile.
settings.register_profile("mutants", derandomize=True, deadline=None, phases=(Phase.explicit, Phase.generate))
os.environ["HYPOTHESIS_PROFILE"] = "mutants"


def pytest_sessionstart() -> None:
    planter = named(os.environ[NAME_VARIABLE]).planter if os.environ.get(NAME_VARIABLE) else None
    if isinstance(planter, Simulated):
        from tests.sim.bugs import BUGS

        if planter.name not in BUGS:
            note(unplantable=f"tests/sim/bugs.py has no bug {planter.name}")
            raise pytest.UsageError(f"no bug {planter.name}")
        _planted.enter_context(BUGS[planter.name]())
        note(planted=f"simulated {planter.name}")


def pytest_sessionfinish() -> None:
    _planted.close()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.outcome == "passed":
        note(passed=report.nodeid)
    if report.when == "call" and report.outcome == "failed":
        note(failed=report.nodeid, late="Timeout (>" in report.longreprtext)
