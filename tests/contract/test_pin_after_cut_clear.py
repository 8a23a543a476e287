"""A clear that is cut short while one of its deletions is in progress, and a pin right after it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore.census.selection import Selection
from kvstore.errors import Unavailable
from tests.kit.backends import backend
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.stores import SMALL, kv_of

TOKENS = np.arange(3 * SMALL.chunk_tokens)


@pytest.mark.parametrize("deletion", [1, 2, 3])
def test_pin_after_clear_cut_short_keeps_its_chunks(tmp_root: Path, deletion: int) -> None:
    """The deletion ends after the pin: the pin is refused, or all that it covers stays."""
    reached, proceed = threading.Event(), threading.Event()

    def block() -> None:
        reached.set()
        assert proceed.wait(PATIENCE_S)

    with backend("embedded", tmp_root) as made:
        cache = made.cache()
        cache.put(TOKENS, kv_of(SMALL, TOKENS))
        with made.steps.armed(deletion, block, only="remove chunks/"):
            operation = made.store.clear(Selection(namespace=cache.namespace.digest))
            assert reached.wait(PATIENCE_S)
            operation.cancel()
            assert operation.wait(PATIENCE_S) and operation.state == "cancelled"
            try:
                pinned = cache.pin(TOKENS).tokens
            except Unavailable:
                pinned = 0
            proceed.set()
            eventually(lambda: made.steps.has_ended, "the deletion ends")
        assert all(made.on_root(cache, TOKENS)[: pinned // SMALL.chunk_tokens]), "a pinned chunk is deleted"
