"""KV comes to a device and leaves it through pinned memory used in turn: never before what lies there has gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvstore
from kvstore.client import Cache
from kvstore.connectors.transformers import device
from kvstore.connectors.transformers.kept import Kept
from kvstore.layout import Layout
from tests.engines.transformers.bus import Bus, bus_in_memory

LAYOUT = Layout(7, 2, 8, "bfloat16", 16)
TOKENS = np.arange(10 * LAYOUT.chunk_tokens)
KV = np.random.default_rng(0).integers(0, 1 << 16, LAYOUT.shape(len(TOKENS)), dtype=np.uint16)
ROWS = torch.from_numpy(KV.reshape(7, 2, len(TOKENS), -1).view(np.int16)).view(torch.bfloat16)
KEPT = Kept((2, 8), (2, 8), torch.bfloat16, (torch.device("cpu"),) * 7)


def same(layers: Any, expected: Any) -> bool:
    """Compares bits: random ones are NaN now and then."""
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(layers, expected, strict=True))


@pytest.fixture(params=[True, False], ids=["late", "at once"])
def bus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bus:
    return bus_in_memory(monkeypatch, is_late=request.param)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with kvstore.open(tmp_path, max_bytes=None) as store:
        made = store.namespace("m", LAYOUT)
        made.put(TOKENS, KV)
        yield made


@pytest.mark.parametrize("at_once_bytes", [1 << 30, 0])
def test_every_layer_arrives_as_it_was_stored(
    cache: Cache, bus: Bus, at_once_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "AT_ONCE_BYTES", at_once_bytes)
    with cache.hold(TOKENS) as held:
        layers = list(device.arriving(held, LAYOUT, KEPT))
    bus.finish()
    assert len(layers) == 7 and same(layers, ROWS)


@pytest.mark.usefixtures("bus")
def test_every_layer_leaves_as_it_was_computed_in_any_number_of_pieces() -> None:
    rows = torch.zeros_like(ROWS)
    leaving = device.Leaving(rows, KEPT)
    for place in (slice(0, 64), slice(64, 160)):
        for layer in range(7):
            k, v = ROWS[layer, :, place].clone()
            leaving.add(layer, place, k, v)
    leaving.finish()
    assert same(rows, ROWS)
