"""A store on a root of its own, which may be made to fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client import Store
from kvstore.root.posix import PosixRoot
from tests.kit.faulty_root import FaultyRoot
from tests.kit.stores import store_on


@pytest.fixture
def root(tmp_root: Path) -> FaultyRoot:
    return FaultyRoot(PosixRoot(tmp_root))


@pytest.fixture
def store(root: FaultyRoot) -> Iterator[Store]:
    with store_on(root) as opened:
        yield opened
