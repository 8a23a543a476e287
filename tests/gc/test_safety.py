"""Timings whose relations make no sense are refused."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidRequest
from kvstore_gc.site import Timings
from tests.kit.cases import for_each


@for_each(
    "wrong, said",
    [
        ({"staging_age_s": 100.0}, "put_s_max"),
        ({"clock_margin_s": 90.0}, "put_s_max"),
        ({"plan_age_s": 120.0}, "condemn_s_max"),
        ({"condemn_s_max": 90.0}, "condemn_s_max"),
        ({"poll_s_min": 0.0}, "poll_s_min"),
    ],
)
def test_a_relation_that_makes_no_sense_is_refused(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Timings(**wrong)
