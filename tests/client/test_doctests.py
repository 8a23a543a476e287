"""The examples in the docstrings of the public classes run as they are written."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.client import cache as cache_module
from kvstore.client import operation as operation_module
from kvstore.client import store as store_module
from tests.kit.workers import serving

LAYOUT = kvstore.Layout(layers=4, kv_heads=2, head_dim=64, dtype="float16", chunk_tokens=16)
TOKENS = list(range(1000, 1100))
KV = np.random.default_rng(0).standard_normal(LAYOUT.shape(100)).astype(np.float16)
PUBLIC = ("Store", "Cache", "Hold", "BaseHold", "Pin", "Operation", "connect")


def examples(*modules: ModuleType) -> list[doctest.DocTest]:
    found = [test for module in modules for test in doctest.DocTestFinder().find(module) if test.examples]
    return [test for test in found if test.name.split(".")[3] in PUBLIC]


EXAMPLES = examples(store_module, cache_module, operation_module)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as worker:
        yield worker.address


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name.removeprefix("kvstore.client."))
def test_docstring_example_prints_its_output(example: doctest.DocTest, address: str, tmp_path: Path) -> None:
    with kvstore.open(str(tmp_path / "kv"), memory=32 << 20) as store:
        cache = store.namespace("my-model", LAYOUT)
        cache.put(TOKENS, KV, write="through")
        example.globs = {"kvstore": kvstore, "np": np, "store": store, "cache": cache, "address": address}
        example.globs |= {"layout": LAYOUT, "tokens": TOKENS, "kv": KV}
        printed: list[str] = []
        flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
        doctest.DocTestRunner(optionflags=flags).run(example, out=printed.append)
        assert not printed, "".join(printed)


def public_methods() -> Iterator[tuple[str, Any]]:
    for kind in (kvstore.Store, kvstore.Cache, kvstore.Hold, kvstore.Pin, kvstore.Operation):
        for name in dir(kind):
            member = getattr(kind, name)
            if not name.startswith("_") and (callable(member) or isinstance(member, property)):
                yield f"{kind.__name__}.{name}", member


@pytest.mark.parametrize("name, member", list(public_methods()), ids=lambda each: each if isinstance(each, str) else "")
def test_public_method_has_an_example(name: str, member: Any) -> None:
    assert "\nExamples\n" in (inspect.getdoc(member) or ""), name
