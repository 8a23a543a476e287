"""Arguments of ``store.control`` that are none: nothing is sent, and the error names the argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.client.control import Control
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.text import brief
from tests.client.test_keywords import LONG, ODD
from tests.kit.administration import KV, TOKENS
from tests.kit.cases import for_each
from tests.kit.stores import SMALL
from tests.kit.workers import Served, connected, serving

EVERYTHING = kvstore.Selection(older_than_s=1e-9)
NUMBERS = [1.5, float("inf"), 10**30, LONG]

METHODS: dict[str, Mapping[str, Any]] = {
    "lookup": {"cache": None, "tokens": TOKENS},
    "drain": {"worker": "127.0.0.1:1"},
    "set_limits": {"changes": {}},
}
"""The methods of ``Control`` that have arguments, with right ones; the cache is filled in."""

RIGHT: Mapping[str, list[Any]] = {
    "tokens": [[], {}, np.array([]), np.arange(3)],
    "chunks_max": [10**30, LONG],
    "worker": [None],
    "within": NUMBERS[:1],
    "timeout": [None, *NUMBERS],
    "dry_run": [True, np.bool_(True)],
    "pinned": [True, np.bool_(True)],
    "changes": [{}],
}
"""Values of ODD that an argument may have."""

NESTED: Mapping[str, list[Any]] = {
    "changes": [
        {1: 2},
        {"\ud800": 1},
        {"calls_max": "\ud800"},
        {"calls_max": None},
        {"calls_max": [1]},
        {"calls_max": LONG},
        {"calls_max": True},
        {"calls_max": np.arange(3)},
    ],
}
"""What looks right from outside."""


@dataclass(frozen=True)
class Steered:
    served: Served
    store: kvstore.Store
    cache: kvstore.Cache

    def given(self, name: str) -> dict[str, Any]:
        """Right arguments of a method."""
        return {**METHODS[name], **({"cache": self.cache} if "cache" in METHODS[name] else {})}


@pytest.fixture(scope="module")
def steered() -> Iterator[Steered]:
    with serving() as served, connected(served) as store:
        cache = store.namespace("m", SMALL)
        cache.put(TOKENS, KV)
        yield Steered(served, store, cache)


def wrong_values(argument: str) -> list[Any]:
    """All that ``argument`` must not be."""
    right = RIGHT.get(argument, [])
    odd = [
        value for value in ODD if not any(type(value) is type(each) and brief(value) == brief(each) for each in right)
    ]
    return odd + NESTED.get(argument, [])


def complaint(argument: str, value: Any, error: KVStoreError | None) -> str:
    """What is wrong with the error for a value; empty if it says what it should."""
    expected = "is not one of" if isinstance(value, str) and argument == "worker" else "expected"
    if isinstance(error, InvalidRequest) and argument in str(error) and expected in str(error):
        return ""
    return f"{argument}={brief(value)}: {error!r}"


def wrongs_of(call: Callable[..., object], given: Mapping[str, Any]) -> list[str]:
    """What the errors of a call say wrongly, over every argument and every wrong value."""
    found = []
    for argument in inspect.signature(call).parameters:
        for value in wrong_values(argument):
            try:
                call(**{**given, argument: value})
                error = None
            except KVStoreError as refused:
                error = refused
            except Exception as raw:  # noqa: BLE001 - what must not come is the question
                found.append(f"{argument}={brief(value)}: raw {raw!r}")
                continue
            found += filter(None, [complaint(argument, value, error)])
    return found


@for_each("name", METHODS)
def test_a_wrong_argument_is_named_and_nothing_is_begun(steered: Steered, name: str) -> None:
    assert wrongs_of(getattr(steered.store.control, name), steered.given(name)) == []
    assert not steered.served.worker.service.gate.draining


def test_wrong_argument_of_an_operation_is_named(steered: Steered) -> None:
    assert wrongs_of(steered.store.clear, {"selection": EVERYTHING, "dry_run": True}) == []
    operation = steered.store.clear(EVERYTHING, dry_run=True)
    assert wrongs_of(operation.wait, {}) == []
    assert wrongs_of(steered.cache.prefetch, {"tokens": TOKENS}) == []
    assert operation.wait() and operation.state == "done"
    assert all(each.last.kind == "clear" for each in steered.store.operations())


def test_every_method_with_arguments_is_asked() -> None:
    methods = {name: each for name, each in vars(Control).items() if not name.startswith("_") and callable(each)}
    assert {name for name, each in methods.items() if len(inspect.signature(each).parameters) > 1} == set(METHODS)


def test_a_store_in_this_process_has_no_control(tmp_root: Path) -> None:
    with kvstore.open(tmp_root / "root") as store, pytest.raises(InvalidRequest, match="connect to a worker"):
        _ = store.control
