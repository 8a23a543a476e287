"""Pytest's part in a run with a mutant: notes which test failed, and how."""

from __future__ import annotations

import os

import pytest
from hypothesis import Phase, settings

from tests.mutants.planting import note

# A failure is enough: to shrink its example takes minutes. tests/conftest.py loads the profile.
settings.register_profile("mutants", derandomize=True, deadline=None, phases=(Phase.explicit, Phase.generate))
os.environ["HYPOTHESIS_PROFILE"] = "mutants"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.outcome == "passed":
        note(passed=report.nodeid)
    if report.when == "call" and report.outcome == "failed":
        note(failed=report.nodeid, late="Timeout (>" in report.longreprtext)
