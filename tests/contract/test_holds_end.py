"""Every way in which a client's hold ends gives back its share of the worker's limits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvstore.client import Cache
from kvstore.worker.limits import WorkerLimits
from tests.kit.backends import REMOTE, Backend, backend
from tests.kit.patience import eventually
from tests.kit.stores import SMALL, kv_of

TOKENS = np.arange(4 * SMALL.chunk_tokens)
LIMITED = {
    "count": WorkerLimits(holds_max=2),
    "tokens": WorkerLimits(hold_tokens_max=2 * len(TOKENS)),
}
ROUNDS = 4
"""Twice as many holds as fit at once."""


def end_by_release(made: Backend, cache: Cache) -> None:
    with cache.hold(TOKENS) as hold:
        assert hold.tokens == len(TOKENS)


def end_by_time(made: Backend, cache: Cache) -> None:
    hold = cache.hold(TOKENS, ttl=0.001)
    eventually(lambda: made.store.stats()["client_holds"] == 0, "the hold expires")
    hold.release()


def end_by_error(made: Backend, cache: Cache) -> None:
    with pytest.raises(RuntimeError), cache.hold(TOKENS):
        raise RuntimeError


ENDS = {"release": end_by_release, "time": end_by_time, "error": end_by_error}


@pytest.mark.parametrize("limit", LIMITED)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("way", REMOTE)
def test_hold_after_many_ended_fits_limits(tmp_root: Path, way: str, end: str, limit: str) -> None:
    with backend(way, tmp_root, worker_limits=LIMITED[limit]) as made:
        cache = made.cache()
        cache.put(TOKENS, kv_of(SMALL, TOKENS))
        for _ in range(ROUNDS):
            ENDS[end](made, cache)
            eventually(lambda: made.store.stats()["client_holds"] == 0, "the hold ends")
        made.assert_idle()
