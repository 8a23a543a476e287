"""KV comes to a device and leaves it through pinned memory used in turn: never before what lies there has gone.

The bus is one in memory: a copy takes place as late as may be, when somebody waits for it, or at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvstore
from kvstore.client import Cache
from kvstore.connectors.transformers import prefill
from kvstore.connectors.transformers import prefill as device
from kvstore.connectors.transformers.cache_spec import TokenShape
from kvstore.core.layout import Layout
from kvstore.errors import HoldBroken

LAYOUT = Layout(7, 2, 8, "bfloat16", 16)
TOKENS = np.arange(10 * LAYOUT.chunk_tokens)
KV = np.random.default_rng(0).integers(0, 1 << 16, LAYOUT.shape(len(TOKENS)), dtype=np.uint16)
ROWS = torch.from_numpy(KV.reshape(7, 2, len(TOKENS), -1).view(np.int16)).view(torch.bfloat16)
KEPT = TokenShape((2, 8), (2, 8), torch.bfloat16, (torch.device("cpu"),) * 7)


class Bus:
    """A stream whose copies wait until their event is waited for, or do not wait."""

    def __init__(self, *, is_late: bool) -> None:
        self._is_late = is_late
        self._waiting: list[Callable[[], object]] = []

    def copy(self, target: Any, source: Any) -> None:
        if self._is_late:
            self._waiting.append(lambda: target.copy_(source))
        else:
            target.copy_(source)

    def event(self, _: object = None) -> Any:
        mine, self._waiting = self._waiting, []
        return Event(mine)

    def wait_stream(self, _: object) -> None:
        pass


class Event:
    def __init__(self, copies: list[Callable[[], object]]) -> None:
        self._copies = copies

    def synchronize(self) -> None:
        while self._copies:
            self._copies.pop(0)()


class Pinned(torch.Tensor):  # type: ignore[misc]
    """Memory whose copies that do not block go over the bus."""

    bus: Bus

    def to(self, *_: object, non_blocking: bool = False) -> Any:
        assert non_blocking
        arriving = torch.zeros(self.shape, dtype=self.dtype)
        self.bus.copy(arriving, self.as_subclass(torch.Tensor))
        return arriving

    def copy_(self, source: Any, non_blocking: bool = False) -> Any:
        assert non_blocking
        self.bus.copy(self.as_subclass(torch.Tensor), source)
        return self


def same(layers: Any, expected: Any) -> bool:
    """Compares bits: random ones are NaN now and then."""
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(layers, expected, strict=True))


@pytest.fixture(autouse=True)
def no_device() -> Iterator[None]:
    """The bus here is one in memory, wherever other tests have their models."""
    with torch.device("cpu"):
        yield


@pytest.fixture(params=[True, False], ids=["late", "at once"])
def bus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bus:
    made = Bus(is_late=request.param)
    monkeypatch.setattr(Pinned, "bus", made, raising=False)
    monkeypatch.setattr(device, "_pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype).as_subclass(Pinned))
    monkeypatch.setattr(device, "_event", made.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: made)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    return made


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with kvstore.open(tmp_path, max_bytes=None) as store:
        made = store.namespace("m", LAYOUT)
        made.put(TOKENS, KV)
        yield made


@pytest.mark.usefixtures("bus")
@pytest.mark.parametrize("at_once_bytes", [1 << 30, 0])
def test_every_layer_arrives_as_it_was_stored(
    cache: Cache, at_once_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "AT_ONCE_BYTES", at_once_bytes)
    with cache.hold(TOKENS) as held:
        layers = list(device.arriving(held, LAYOUT, KEPT))
    assert len(layers) == 7 and same(layers, ROWS)


@pytest.mark.usefixtures("bus")
@pytest.mark.parametrize("at_once_bytes", [1 << 30, 0])
def test_every_layer_leaves_as_it_was_computed(at_once_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_gpu", lambda _: True)
    monkeypatch.setattr(device, "AT_ONCE_BYTES", at_once_bytes)
    leaving = device.OffloadStream(len(TOKENS), KEPT)
    for layer in range(7):
        leaving.add(layer, *ROWS[layer].clone())
    assert same(leaving.rows(), ROWS)


@pytest.mark.usefixtures("bus")
@pytest.mark.parametrize("at_once_bytes", [1 << 30, 0])
def test_a_chunk_that_is_lost_ends_the_prefix_there(
    cache: Cache, tmp_path: Path, at_once_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "AT_ONCE_BYTES", at_once_bytes)
    arriving = device.arriving

    def losing(held: Any, layout: Layout, kept: TokenShape) -> Iterator[Any]:
        for file in sorted(file for file in (tmp_path / "chunks").rglob("*") if file.is_file())[::2]:
            file.unlink()
        yield from arriving(held, layout, kept)

    monkeypatch.setattr(prefill, "arriving", losing)
    with cache.hold(TOKENS) as held, pytest.raises(HoldBroken):
        list(losing(held, LAYOUT, KEPT))
    cache.put(TOKENS, KV)
    count, layers = prefill._load_layers(cache, KEPT, TOKENS)
    assert count < len(TOKENS) and count % LAYOUT.chunk_tokens == 0
    assert not layers or same(layers, ROWS[:, :, :count])
