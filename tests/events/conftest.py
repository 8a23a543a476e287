"""Clusters for tests of events, on a root in memory and on files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.root.interface import Root
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.root.posix import PosixRoot
from tests.kit.clusters import Cluster, cluster
from tests.kit.events import Ticking


@pytest.fixture(params=["memory", "files"])
def any_root(request: pytest.FixtureRequest, tmp_root: Path) -> Root:
    return PosixRoot(str(tmp_root)) if request.param == "files" else MemoryRoot(MemoryFiles())


@pytest.fixture
def clustered(any_root: Root) -> Iterator[Cluster]:
    with cluster(any_root) as made:
        yield made


@pytest.fixture
def clock() -> Ticking:
    return Ticking()
