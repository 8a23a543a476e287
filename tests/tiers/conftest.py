"""A node with memory, on a root that may be made to fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.faulty_root import FaultyRoot
from tests.kit.tiers import Acting, faulty, on_posix


@pytest.fixture(params=["memory", "posix"])
def root(request: pytest.FixtureRequest, tmp_root: Path) -> FaultyRoot:
    return faulty(on_posix(tmp_root / "root") if request.param == "posix" else None)


@pytest.fixture
def node(root: FaultyRoot) -> Iterator[Acting]:
    with Acting(root) as acting:
        yield acting
