"""Arguments of ``store.control`` that are none: nothing is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.errors import InvalidRequest
from tests.worker.serving import connected, serving

EVERYTHING = kvstore.Selection(older_than_s=1e-9)


@pytest.mark.parametrize("name", ["dry_run", "pinned"])
@pytest.mark.parametrize("flag", [None, 0, 1, -1, "yes", 10**30, np.False_])
def test_what_is_only_like_a_flag_clears_nothing(tmp_root: Path, name: str, flag: Any) -> None:
    tmp_root.mkdir(exist_ok=True)
    with serving(tmp_root) as served, connected(served) as store:
        with pytest.raises(InvalidRequest, match=f"{name}=.*: expected True or False"):
            store.control.clear(EVERYTHING, **{name: flag})
        assert store.control.tickets() == []


@pytest.mark.parametrize("seconds", [None, "1", -1, True, 10**400, float("nan"), float("inf")])
def test_what_is_no_number_of_seconds_is_refused(tmp_root: Path, seconds: Any) -> None:
    tmp_root.mkdir(exist_ok=True)
    with serving(tmp_root) as served, connected(served) as store:
        for call in (store.control.clear, store.control.compress, store.control.decompress, store.control.reencrypt):
            with pytest.raises(InvalidRequest, match=r"deadline=.*: expected a number of seconds"):
                call(EVERYTHING, deadline=seconds)
        with pytest.raises(InvalidRequest, match=r"within=.*: expected a number of seconds"):
            store.control.drain(within=seconds)
        assert store.control.tickets() == []
