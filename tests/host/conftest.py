"""A root of one host whose parts a test drives itself, without stores, threads and child processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.host_parts import Parts


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    with Parts.on(tmp_path / "root") as made:
        yield made
