"""A store and its cache for each test, on its own root."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore.client import Cache, Store
from tests.kit.peers import cache_of


@pytest.fixture
def store(tmp_root: Path) -> Iterator[Store]:
    with kvstore.open(str(tmp_root)) as opened:
        yield opened


@pytest.fixture
def cache(store: Store) -> Cache:
    return cache_of(store)
