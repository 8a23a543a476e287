"""Stand-ins for the vLLM modules that the connector imports: empty base classes, for tests that need no more."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

OURS = [
    f"kvstore.connectors.{name}"
    for name in (
        "vllm.scheduler",
        "vllm.messages",
        "vllm.namespaces",
        "vllm.gpu_copy",
        "vllm.worker",
        "vllm.descents",
        "vllm_tier",
    )
]


@contextmanager
def vllm_modules(contents: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """These modules with these contents; ours that import them are forgotten before and after."""
    names = {
        name.rsplit(".", depth)[0] for name in ("torch", "vllm", *contents) for depth in range(name.count(".") + 1)
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setitem(sys.modules, name, ModuleType(name))
            vars(sys.modules[name]).update(contents.get(name, {}))
        for name in OURS:
            patch.delitem(sys.modules, name, raising=False)
        yield
        for name in OURS:
            sys.modules.pop(name, None)
