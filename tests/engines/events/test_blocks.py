"""``kvstore events`` tells Dynamo's indexer of the blocks that a real vLLM stored, and of those that the store lost."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from kvstore.root.identity import read_namespaces
from kvstore.root.posix import PosixRoot
from tests.cli.conftest import serving
from tests.engines.events.indexer import BLOCK_TOKENS, Indexer
from tests.engines.events.servers import complete, server
from tests.engines.vllm.engines import PYTHON, full_blocks, prompt, stored_files, transfer
from tests.kit.patience import eventually
from tests.kit.ports import free_port

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make engines-test ENGINES=vllm")

ENGINE, POOL = 1, 2
LONG, OTHER = prompt(1, 300), prompt(2, 200)


def answered(query: str, name: str, tokens: list[int]) -> int:
    """How many leading tokens of a prompt the publisher says are stored."""
    asked = json.dumps({"model": name, "token_ids": tokens}).encode()
    with urllib.request.urlopen(f"http://{query}/query", asked, timeout=30) as answer:
        return int(json.load(answer)["longest_matched"])


def test_the_pool_tells_the_blocks_that_vllm_stored_under_its_hashes_and_their_removal_while_it_is_idle(
    workplace: Path, model: Path, tmp_path: Path, indexer: Indexer
) -> None:
    root, pool = tmp_path / "root", [free_port(), free_port()]
    with server(workplace, model, transfer({"root": str(root)})) as (url, ports):
        indexer.register(ENGINE, *ports)
        complete(url, LONG)
        complete(url, OTHER)
        both = full_blocks(LONG) + full_blocks(OTHER)
        eventually(lambda: len(stored_files(root)) == both // BLOCK_TOKENS, "the engine stored what it computed")
        words = ("--publish", f"tcp://*:{pool[0]}", "--replay", f"tcp://*:{pool[1]}")
        with serving(tmp_path, "events", "--root", str(root), *words) as publisher:
            indexer.register(POOL, *pool)
            eventually(lambda: indexer.tokens(LONG).get(POOL) == full_blocks(LONG), "all blocks are published")
            assert indexer.tokens(OTHER)[POOL] == full_blocks(OTHER)
            (model_name,) = {each.name for each in read_namespaces(PosixRoot(root))}
            query = publisher.said["query"]
            assert [answered(query, model_name, each) for each in (LONG, OTHER, LONG[1:])] == [
                full_blocks(LONG),
                full_blocks(OTHER),
                0,
            ], "a router that knows tokens alone"
            assert indexer.blocks()[POOL] == indexer.blocks("device")[ENGINE], "under the engine's names"
            gone = min(stored_files(root), key=lambda each: each.stat().st_mtime_ns)
            gone.unlink()
            eventually(
                lambda: sum(indexer.blocks().get(POOL, Counter()).values()) < both // BLOCK_TOKENS,
                "the removal is published",
            )
            for each in stored_files(root):
                each.unlink()
            eventually(lambda: not indexer.blocks().get(POOL), "nothing is left, and the engine had no request")
            assert indexer.tokens(LONG).get(POOL, 0) == 0
            publisher.end()
