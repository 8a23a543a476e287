"""Fixtures of collectors on real nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gc.cluster import cluster
from tests.gc.place import Place


@pytest.fixture
def place() -> Iterator[Place]:
    with cluster() as made:
        yield Place(made)
