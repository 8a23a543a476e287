"""Invalid arguments of ``store.control`` and of operations: nothing is sent, and the error names the argument."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.errors import InvalidRequest
from tests.kit.administration import KV, TOKENS
from tests.kit.stores import SMALL
from tests.kit.workers import Served, connected, serving

NAN = float("nan")
EVERYTHING = kvstore.Selection(older_than_s=1e-9)
FLAGS = ["yes", 1, None]
SECONDS = [-1.0, NAN, "soon", True]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


def refusals(call: Any, right: dict[str, Any], wrong: dict[str, list[Any]]) -> list[str]:
    """Calls with each wrong value; returns those that are not refused by an error that names the argument."""
    found = []
    for argument, values in wrong.items():
        for value in values:
            try:
                call(**{**right, argument: value})
                found.append(f"{argument}={value!r} is taken")
            except InvalidRequest as refused:
                if argument.removesuffix("s") not in str(refused):  # of one token
                    found.append(f"{argument}={value!r}: {refused}")
    return found


def test_invalid_argument_is_named_and_begins_nothing(served: Served) -> None:
    with connected(served) as store:
        cache, control = store.namespace("m", SMALL), store.control
        cache.put(TOKENS, KV)
        wrong_tokens: dict[str, list[Any]] = {"tokens": ["abc", 1.5, [-1], [1 << 32], None]}
        lookup: dict[str, list[Any]] = {"cache": [None, "m"], "chunks_max": [-1, 1.5, "1", True], **wrong_tokens}
        assert refusals(control.lookup, {"cache": cache, "tokens": TOKENS}, lookup) == []
        assert refusals(control.drain, {}, {"worker": [1, b"w", "127.0.0.1:1"], "within": SECONDS}) == []
        changes = ["calls_max", 5, {1: 2}, {"calls_max": None}, {"calls_max": [1]}, {"calls_max": "\ud800"}]
        assert refusals(control.set_limits, {}, {"changes": changes}) == []
        clear: dict[str, list[Any]] = {"selection": [None, "m"], "dry_run": FLAGS, "pinned": FLAGS}
        assert refusals(store.clear, {"selection": EVERYTHING, "dry_run": True}, clear) == []
        assert refusals(cache.prefetch, {"tokens": TOKENS}, {**wrong_tokens, "tier": [1, "root"], "worker": [1]}) == []
        operation = store.clear(EVERYTHING, dry_run=True)
        assert refusals(operation.wait, {}, {"timeout": ["soon", NAN, np.arange(3)]}) == []
        assert operation.wait() and operation.state == "done"
        assert not served.worker.service.gate.draining
        assert [each.id for each in store.operations()] == [operation.id]


def test_store_in_this_process_has_no_control(tmp_root: Path) -> None:
    with kvstore.open(tmp_root / "root") as store, pytest.raises(InvalidRequest, match="connect to a worker"):
        _ = store.control
