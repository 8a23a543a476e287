"""Fixtures of the tests with a real vLLM: the model, one reference run without a store, a small cluster.

They start engines, which takes minutes: only `make engines-test` runs them, in the environment of .ci/engines.sh.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.vllm.engines import PYTHON, Answer, prompt, running_engine
from tests.kit.etcd import running_etcd

collect_ignore_glob = [] if os.environ.get("KVSTORE_TEST_ENGINES") and PYTHON.exists() else ["test_*.py"]

LONG = prompt(1, 300)
"""Nine full blocks and a part of one."""
PROMPTS = {
    "long": LONG,
    "other": prompt(2, 200),
    "branch": LONG[:128] + prompt(3, 100),
    "exact": prompt(4, 96),
    "short": prompt(5, 20),
    **{f"many {number}": prompt(100 + number, 130) for number in range(6)},
}


CROWD = [prompt(200 + number, 200) for number in range(8)]
"""More than the engines of these tests have blocks for at once."""
CROWD_TOKENS = 60


@pytest.fixture(scope="session")
def reference(workplace: Path, model: Path) -> dict[str, Answer]:
    """The answers of vLLM without a store to each prompt, and as ``crowd`` to all of ``CROWD``."""
    with running_engine(workplace, {"model": str(model), "enable_prefix_caching": False}) as engine:
        answers = {name: engine.generate(tokens) for name, tokens in PROMPTS.items()}
        answers["crowd"] = engine.generate(*CROWD, tokens=CROWD_TOKENS)
    return answers


@pytest.fixture(scope="module")
def etcd(module_root: Path) -> Iterator[str]:
    """Endpoints of an etcd of this module."""
    with running_etcd(module_root / "etcd") as server:
        yield server.endpoints


@pytest.fixture(scope="module")
def root(module_root: Path) -> Path:
    """The root of this module."""
    return module_root / "root"
