"""Layers by native code: equal to Python's, with few open files, and no write after they were given up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client.store import Store
from kvstore.engine.layers import LayerRun
from kvstore.engine.settings import Limits
from kvstore.errors import HoldBroken
from kvstore.native import is_available
from kvstore.native import library as native
from tests.kit.native_modes import Paused, open_files, opened
from tests.kit.patience import eventually, returns, slowness
from tests.kit.stores import LAYOUTS, SMALL, fresh, kv_of, same

pytestmark = pytest.mark.skipif(not is_available(), reason="the native library was not built, or is turned off")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[LayerRun]:
    """Collects the layer runs that the test makes."""
    made: list[LayerRun] = []
    real = LayerRun.__init__

    def init(self: LayerRun, *arguments: Any) -> None:
        real(self, *arguments)
        made.append(self)

    monkeypatch.setattr(LayerRun, "__init__", init)
    return made


def check(store: Store, layout: Any, tokens: Any, kv: Any) -> None:
    with store.namespace("m", layout).hold(tokens) as hold:
        assert hold.tokens == len(tokens)
        layers = list(hold.layers())
    assert len(layers) == layout.layers
    for layer, k, v in layers:
        assert same(k, kv[layer, 0]) and same(v, kv[layer, 1])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layers_are_right_with_however_few_files_open(
    tmp_root: Path, layout: Any, runs: list[LayerRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    for files_max in (1, 256):
        root = fresh(tmp_root)
        tokens = np.arange(12 * layout.chunk_tokens)
        kv = kv_of(layout, tokens)
        most, before = 0, open_files(root)
        real = native.library.kv_read_parts

        def read(*arguments: object, root: Path = root, real: Any = real) -> None:
            nonlocal most
            real(*arguments)
            most = max(most, open_files(root))

        with opened(root, native=True, limits=Limits(open_files_max=files_max)) as store:
            store.namespace("m", layout).put(tokens, kv)
            before = open_files(root)
            with monkeypatch.context() as patch:
                patch.setattr(native.library, "kv_read_parts", read)
                check(store, layout, tokens, kv)
            assert all((run.fds == -1).all() for run in runs) and open_files(root) == before
            assert most <= before + 2 * 12, "two bands are read at once"
            stats = store.stats()
            assert stats["bytes_read"] == kv.nbytes, "every byte once, and none by Python after native code"
        with opened(root, native=False) as store:
            check(store, layout, tokens, kv)
        assert len(runs) == 1
        runs.clear()


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Iterator[Paused]:
    found = Paused(native.library, "kv_open_parts")
    monkeypatch.setattr(native, "library", found)
    yield found
    found.release.set()


def test_layers_on_a_mount_that_hangs_end_in_time_and_write_nothing_afterwards(tmp_root: Path, paused: Paused) -> None:
    tokens = np.arange(6 * SMALL.chunk_tokens)
    with opened(tmp_root, native=True, limits=Limits(read_deadline_s=0.3 * slowness())) as store:
        cache = store.namespace("m", SMALL)
        cache.put(tokens, kv_of(SMALL, tokens))
        before = open_files(tmp_root)
        with cache.hold(tokens) as hold:
            with pytest.raises(HoldBroken, match="not read in time"):
                returns(lambda: list(hold.layers()))
            assert paused.reached.is_set()
        paused.release.set()
        eventually(lambda: open_files(tmp_root) == before, "the close of what was opened late")
