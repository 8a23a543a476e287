"""A store that fails, or a process that dies: the prompt is still computed, and the next one finds good KV."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore.client import Store
from kvstore.client.limits import ClientLimits
from kvstore.connectors.transformers import model_cache, prefill_with_store
from kvstore.engine.settings import Limits
from tests.engines.transformers.models import CHUNK, difference, llama, logits_after, logits_without_store, prompt
from tests.kit.faulty_root import EIO, ENOSPC, EROFS, Fails, FaultyRoot, Hang, Rule
from tests.kit.patience import returns
from tests.kit.stores import chunk_files, flip, store_on

QUICK = Limits(match_deadline_s=0.4, read_deadline_s=0.4, write_deadline_s=0.6, stall_s=0.5, io_threads=4, width=2)
MODEL = llama()
IDS = prompt(100)
EXPECTED = logits_without_store(MODEL, IDS, 96)


def is_right(store: Store) -> bool:
    """True if a prefill with this store gives the result of a run without it; fails if it does not end."""
    past = returns(lambda: prefill_with_store(MODEL, IDS, store, chunk_tokens=CHUNK))
    assert past.get_seq_length() == 96
    return difference(logits_after(MODEL, IDS, past), EXPECTED) < 1e-4


@pytest.fixture
def store(root: FaultyRoot) -> Iterator[Store]:
    opened = store_on(root, QUICK)
    yield opened
    root.set_rules([])
    opened.close()


@pytest.mark.parametrize("damaged", [0, 3, 5])
def test_a_damaged_chunk_is_computed_anew_and_repaired(store: Store, tmp_root: Path, damaged: int) -> None:
    assert is_right(store)
    files = sorted(chunk_files(tmp_root), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    flip(files[damaged])
    assert is_right(store)
    assert store.stats()["quarantined"] == 1
    assert len(chunk_files(tmp_root)) == 6, "repaired"
    read = store.stats()["chunks_read"]
    assert is_right(store)
    assert store.stats()["chunks_read"] - read == 6


@pytest.mark.parametrize("operation", ["open", "read", "stat", "stage", "publish"])
def test_a_root_that_hangs_costs_its_deadlines_and_no_more(
    store: Store, root: FaultyRoot, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    stored = operation in ("open", "read")
    if stored:
        assert is_right(store)
    else:
        model_cache(MODEL, store, chunk_tokens=CHUNK)
    hang = Hang()
    root.set_rules([Rule(operation, hang)])
    with caplog.at_level(logging.WARNING):
        assert is_right(store)
    assert hang.reached.is_set()
    root.set_rules([])
    hang.release.set()
    assert stored or "prefill.not_stored" in caplog.text


@pytest.mark.parametrize(("operation", "fault"), [("stage", ENOSPC), ("stage", EROFS), ("publish", EIO), ("open", EIO)])
def test_a_root_that_fails_is_no_error(store: Store, root: FaultyRoot, operation: str, fault: Fails) -> None:
    model_cache(MODEL, store, chunk_tokens=CHUNK)
    root.set_rules([Rule(operation, fault)])
    assert is_right(store)
    root.set_rules([])
    assert is_right(store)
    assert is_right(store)


def test_a_store_that_is_down_from_the_start_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with kvstore.connect("127.0.0.1:1", limits=ClientLimits(match_s=0.5, read_s=0.5, write_s=0.5, pin_s=0.5)) as store:
        assert is_right(store)
    assert "prefill.without_store" in caplog.text
