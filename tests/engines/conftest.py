"""Fixtures of the tests with real engines: the tiny model, and a store whose root fails on demand."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.engine.settings import Limits
from kvstore.root.posix import PosixRoot
from tests.engines.vllm.engines import make_model
from tests.kit.faulty_root import FaultyRoot
from tests.kit.stores import store_on

QUICK = {"lookup_timeout_s": 0.5, "load_timeout_s": 0.5, "store_timeout_s": 0.8}
LIMITS = Limits(match_deadline_s=0.5, read_deadline_s=0.5, write_deadline_s=0.8, stall_s=1.0, io_threads=4, width=2)


@pytest.fixture
def root(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyRoot]:
    """A root that can fail, on which connectors open their stores."""
    from kvstore.connectors.common import EngineSettings  # not every environment has what it needs

    faulty = FaultyRoot(PosixRoot(tmp_root))
    monkeypatch.setattr(EngineSettings, "open", lambda _: store_on(faulty, LIMITS))
    yield faulty
    faulty.set_rules([])


@pytest.fixture(scope="session")
def workplace() -> Iterator[Path]:
    """A folder for models, logs and caches of this run."""
    with tempfile.TemporaryDirectory(prefix="kvstore-engines-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture(scope="session")
def model(workplace: Path) -> Path:
    """The tiny model."""
    return make_model(workplace, "tiny", 7)
