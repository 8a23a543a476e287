"""Fixtures of the tests with Dynamo's real indexer, and with a real vLLM where that is installed.

Only ``make events-test`` runs them, in the environments of .ci/engines.sh.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.events.indexer import PYTHON, Indexer, running_indexer

collect_ignore_glob = [] if os.environ.get("KVSTORE_TEST_ENGINES") and PYTHON.exists() else ["test_*.py"]


@pytest.fixture
def indexer(workplace: Path) -> Iterator[Indexer]:
    """An indexer that knows nothing yet."""
    with running_indexer(workplace) as found:
        yield found
