"""Fixtures of collectors on real nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.clusters import cluster
from tests.kit.place import Place


@pytest.fixture
def place() -> Iterator[Place]:
    with cluster() as made:
        yield Place(made)
