"""Fixtures of collectors on real nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.clusters import Cluster, cluster
from tests.kit.place import Place


@pytest.fixture
def c() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


@pytest.fixture
def place(c: Cluster) -> Place:
    return Place(c)
