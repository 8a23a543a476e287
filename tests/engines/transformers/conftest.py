"""Runs these tests only where torch and transformers are installed: in the environment that .ci/engines.sh
makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import kvstore
from kvstore.client import Store
from kvstore.root.posix import PosixRoot
from tests.kit.faulty_root import FaultyRoot

collect_ignore_glob = [] if find_spec("torch") and find_spec("transformers") else ["test_*.py"]


@pytest.fixture
def root(tmp_root: Path) -> FaultyRoot:
    return FaultyRoot(PosixRoot(tmp_root))


@pytest.fixture
def store(tmp_root: Path) -> Iterator[Store]:
    with kvstore.open(str(tmp_root)) as opened:
        yield opened
