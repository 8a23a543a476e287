"""A real vLLM with our connector tells Dynamo's indexer what it stored, and what it could not load."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engines.events.indexer import Indexer, free_port, until
from tests.engines.vllm.engines import PYTHON, full_blocks, prompt, running_server, stored_files, transfer

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-engines ENGINES=vllm")

LONG, OTHER = prompt(1, 300), prompt(2, 200)


@contextmanager
def server(workplace: Path, model: Path, config: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """vLLM's server with events: its URL, and the ports of its publisher."""
    ports = [free_port(), free_port()]
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports[0]}",
        "replay_endpoint": f"tcp://*:{ports[1]}",
        "topic": "kv@one@tiny",
    }
    words = ["--kv-events-config", json.dumps(events)]
    with running_server(workplace, model, *words, config=config, port=free_port()) as url:
        yield url, ports


def complete(url: str, tokens: list[int], count: int = 4) -> int:
    """Asks for some tokens; returns how many of the prompt were cached."""
    request = {"model": "tiny", "prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    body = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(request).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(body, timeout=120) as answer:
        found = json.load(answer)
    return int((found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def test_what_the_connector_stored_is_told_without_another_request_and_what_is_gone_with_the_next(
    workplace: Path, model: Path, tmp_path: Path, indexer: Indexer
) -> None:
    root = tmp_path / "root"
    with server(workplace, model, transfer({"root": str(root)})) as (url, ports):
        indexer.register(1, *ports)
        complete(url, LONG)
        until(lambda: indexer.tokens(LONG) == {1: full_blocks(LONG)}, "the engine tells what it stored")
        until(lambda: len(indexer.blocks()[1]) == len(stored_files(root)) == 9, "as many as the root has")
        assert indexer.blocks()[1] == indexer.blocks("device")[1], "under the names that vLLM has for its own"
    with server(workplace, model, transfer({"root": str(root)})) as (url, ports):
        indexer.register(2, *ports)
        complete(url, OTHER)
        complete(url, LONG)
        until(lambda: indexer.tokens(LONG).get(2) == full_blocks(LONG), "what it found there is told too")
        assert set(indexer.blocks()[2]) > set(indexer.blocks()[1])
