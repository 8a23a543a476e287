"""With a Storing a prefill waits for no store: what it computed is stored soon after, within a bound of memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client import Store
from kvstore.connectors.transformers import Storing, model_cache, prefill_with_store
from kvstore.root.posix import PosixRoot
from tests.engines.transformers.models import CHUNK, difference, llama, logits_after, logits_without_store, prompt
from tests.kit.faulty_root import FaultyRoot, Hang, Rule
from tests.kit.patience import eventually
from tests.kit.stores import store_on

MODEL = llama()
IDS = prompt(100)
TOKENS = IDS[0].cpu().numpy()


@pytest.fixture
def root(tmp_root: Path) -> FaultyRoot:
    return FaultyRoot(PosixRoot(tmp_root))


@pytest.fixture
def store(root: FaultyRoot) -> Iterator[Store]:
    opened = store_on(root)
    model_cache(MODEL, opened, chunk_tokens=CHUNK)
    yield opened
    root.set_rules([])
    opened.close()


def prefilled(store: Storing) -> bool:
    """True if a prefill gives the result of a run without a store."""
    past = prefill_with_store(MODEL, IDS, store, chunk_tokens=CHUNK)
    return difference(logits_after(MODEL, IDS, past), logits_without_store(MODEL, IDS, 96)) == 0.0


def stored(store: Store) -> int:
    return model_cache(MODEL, store, chunk_tokens=CHUNK).match(TOKENS)


def test_it_returns_before_the_store_has_it_and_closing_waits(store: Store, root: FaultyRoot) -> None:
    hang = Hang()
    root.set_rules([Rule("stage", hang)])
    with Storing(store) as storing:
        assert prefilled(storing)
        assert hang.reached.wait(30)
        assert stored(store) == 0
        hang.release.set()
    assert stored(store) == 96
    past = prefill_with_store(MODEL, IDS, store, chunk_tokens=CHUNK)
    assert store.stats()["chunks_read"] == 6
    assert difference(logits_after(MODEL, IDS, past), logits_without_store(MODEL, IDS, 96)) == 0.0


def test_what_does_not_fit_beside_what_waits_is_stored_before_the_return(store: Store, root: FaultyRoot) -> None:
    chunk_bytes = model_cache(MODEL, store, chunk_tokens=CHUNK).layout.chunk_bytes
    hang, other = Hang(), prompt(100, seed=9)
    root.set_rules([Rule("stage", hang)])
    with Storing(store, 6 * chunk_bytes) as storing:
        assert prefilled(storing)
        assert hang.reached.wait(30)
        second = threading.Thread(
            target=prefill_with_store, args=(MODEL, other, storing), kwargs={"chunk_tokens": CHUNK}
        )
        second.start()
        second.join(0.5)
        assert second.is_alive(), "it waits for the store"
        hang.release.set()
        second.join(60)
        assert not second.is_alive()
        root.set_rules([])
        eventually(lambda: storing.submit(lambda: None, 6 * chunk_bytes), "its room is free again")
    cache = model_cache(MODEL, store, chunk_tokens=CHUNK)
    assert cache.match(other[0].cpu().numpy()) == stored(store) == 96


def test_without_room_and_once_closed_it_is_stored_before_the_return(store: Store) -> None:
    with Storing(store, 0) as storing:
        assert prefilled(storing)
        assert stored(store) == 96
    other = prompt(100, seed=8)
    prefill_with_store(MODEL, other, storing, chunk_tokens=CHUNK)
    assert model_cache(MODEL, store, chunk_tokens=CHUNK).match(other[0].cpu().numpy()) == 96


def test_an_error_that_nobody_expects_is_logged(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise ValueError("unexpected")

    with Storing(store, 1) as storing:
        assert storing.submit(fails, 1)
        eventually(lambda: storing.submit(lambda: None, 1), "its room is free again")
    assert "unexpected" in caplog.text


def test_i1_a_prompt_whose_memory_is_used_again_keeps_its_tokens(store: Store, root: FaultyRoot) -> None:
    hang, other = Hang(), prompt(100, seed=7)
    root.set_rules([Rule("stage", hang)])
    with Storing(store) as storing:
        given = IDS.clone()
        prefill_with_store(MODEL, given, storing, chunk_tokens=CHUNK)
        assert hang.reached.wait(30)
        prefill_with_store(MODEL, given.copy_(other), storing, chunk_tokens=CHUNK)
        given.zero_()
        hang.release.set()
    for ids in (IDS, other):
        past = prefill_with_store(MODEL, ids, store, chunk_tokens=CHUNK)
        assert difference(logits_after(MODEL, ids, past), logits_without_store(MODEL, ids, 96)) == 0.0
    assert store.stats()["chunks_read"] == 12


def test_what_a_store_does_not_take_in_time_is_given_up_with_a_warning(
    store: Store, root: FaultyRoot, caplog: pytest.LogCaptureFixture
) -> None:
    hang = Hang()
    root.set_rules([Rule("stage", hang)])
    storing = Storing(store)
    for seed in (1, 2):
        prefill_with_store(MODEL, prompt(100, seed=seed), storing, chunk_tokens=CHUNK)
    assert hang.reached.wait(30)
    with caplog.at_level(logging.WARNING):
        assert not storing.close(0.2)
    assert "prompts=2" in caplog.text
    hang.release.set()
    assert storing.close(), "nothing waits any more"
    ids = prompt(100, seed=2)
    assert model_cache(MODEL, store, chunk_tokens=CHUNK).match(ids[0].cpu().numpy()) == 0
