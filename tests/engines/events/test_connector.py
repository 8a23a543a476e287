"""A real vLLM with our connector tells Dynamo's indexer what it stored, and what it could not load."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.events.indexer import Indexer, until
from tests.engines.events.servers import complete, server
from tests.engines.vllm.engines import PYTHON, full_blocks, prompt, stored_files, transfer

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make engines-test ENGINES=vllm")

LONG, OTHER = prompt(1, 300), prompt(2, 200)


def test_what_the_connector_stored_is_told_without_another_request_and_what_is_gone_with_the_next(
    workplace: Path, model: Path, tmp_path: Path, indexer: Indexer
) -> None:
    root = tmp_path / "root"
    with server(workplace, model, transfer({"root": str(root)})) as (url, ports):
        indexer.register(1, *ports)
        complete(url, LONG)
        until(lambda: indexer.tokens(LONG) == {1: full_blocks(LONG)}, "the engine tells what it stored")
        until(lambda: len(indexer.blocks().get(1, ())) == len(stored_files(root)) == 9, "as many as the root has")
        until(
            lambda: indexer.blocks()[1] == indexer.blocks("device").get(1), "under the names that vLLM has for its own"
        )
    with server(workplace, model, transfer({"root": str(root)})) as (url, ports):
        indexer.register(2, *ports)
        complete(url, OTHER)
        complete(url, LONG)
        until(lambda: indexer.tokens(LONG).get(2) == full_blocks(LONG), "what it found there is told too")
        until(lambda: set(indexer.blocks()[2]) > set(indexer.blocks()[1]), "and what it stored itself")
