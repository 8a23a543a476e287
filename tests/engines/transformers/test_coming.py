"""What is stored comes layer by layer while the model computes what follows; what cannot come is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.client import Store
from kvstore.connectors.transformers import device, kept, prefill, prefill_with_store
from tests.engines.transformers.bus import bus_in_memory
from tests.engines.transformers.models import (
    CHUNK,
    MODELS,
    difference,
    llama,
    logits_after,
    logits_without_store,
    prompt,
)
from tests.node.stores import chunk_files

IDS = prompt(100)


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    bus_in_memory(monkeypatch, is_late=False)
    monkeypatch.setattr(prefill, "has_gpu", lambda _: True)


@pytest.fixture(params=[1 << 30, 0], ids=["at once", "layer by layer"], autouse=True)
def at_once_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(device, "AT_ONCE_BYTES", request.param)
    return int(request.param)


@pytest.fixture
def store(tmp_root: Path) -> Iterator[Store]:
    with kvstore.open(str(tmp_root)) as opened:
        yield opened


def filled(model: Any, store: Store, tokens: int) -> None:
    """Stores the first tokens of the prompt."""
    prefill_with_store(model, IDS[:, : tokens + 1], store, chunk_tokens=CHUNK, piece_tokens=CHUNK)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("stored", [0, 16, 48, 96])
def test_a_part_that_is_stored_and_one_that_is_not_are_a_run_without_the_store(
    make: Callable[[], Any], stored: int, store: Store
) -> None:
    model = make()
    filled(model, store, stored)
    past = prefill_with_store(model, IDS, store, chunk_tokens=CHUNK, piece_tokens=CHUNK)
    assert past.get_seq_length() == 96
    ends = range(CHUNK, 97, CHUNK)
    assert difference(logits_after(model, IDS, past), logits_without_store(model, IDS, *ends)) == 0.0
    chunk_bytes, stats = kept.kept_by(model).layout(CHUNK).chunk_bytes, store.stats()
    assert (stats["bytes_read"], stats["chunks_written"]) == (stored // CHUNK * chunk_bytes, 6)


def test_a_model_starts_before_the_last_layer_is_there(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    filled(model, store, 48)
    steps = list[tuple[str, int]]()
    run = kept.run

    def seen(*given: Any) -> Iterator[Any]:
        for layer, rows in enumerate(device.arriving(*given)):
            steps.append(("came", layer))
            yield rows

    def running(model: Any, ids: Any, past: Any, take: Callable[[int, Any, Any], None]) -> None:
        def taking(layer: int, k: Any, v: Any) -> None:
            take(layer, k, v)
            steps.append(("computed", layer))

        run(model, ids, past, taking)

    monkeypatch.setattr(prefill, "arriving", seen)
    monkeypatch.setattr(prefill, "run", running)
    prefill_with_store(model, IDS, store, chunk_tokens=CHUNK)
    assert steps == [(what, layer) for layer in range(4) for what in ("came", "computed")]


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("stored", [48, 96])
def test_a_chunk_that_is_lost_meanwhile_is_computed_anew(
    after: int, stored: int, store: Store, tmp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    filled(model, store, stored)
    lost = list[Path]()

    def losing(held: Any, *given: Any) -> Iterator[Any]:
        for layer, rows in enumerate(device.arriving(held, *given)):
            if layer == after and not lost:
                lost.extend(chunk_files(tmp_root))
                for file in lost:
                    file.write_bytes(b"")
                if after == 3:
                    raise kvstore.errors.HoldBroken("lost", 0)
            yield rows

    monkeypatch.setattr(prefill, "arriving", losing)
    past = prefill_with_store(model, IDS, store, chunk_tokens=CHUNK, piece_tokens=CHUNK)
    ends = range(CHUNK, 97, CHUNK)
    assert lost and difference(logits_after(model, IDS, past), logits_without_store(model, IDS, *ends)) == 0.0


def test_a_store_that_holds_nothing_back_is_asked_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: Any, **__: Any) -> Any:
        raise kvstore.errors.Overloaded("too many holds")

    model = llama()
    filled(model, store, 48)
    monkeypatch.setattr(kvstore.client.Cache, "hold", busy)
    prefill_with_store(model, IDS, store, chunk_tokens=CHUNK)
    assert store.stats()["chunks_read"] == 3, "read without a hold"
