"""vLLM's server with events, and requests to it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.engines.vllm.engines import running_server
from tests.kit.ports import free_port


@contextmanager
def server(
    workplace: Path, model: Path, config: dict[str, Any], *options: str, name: str = "one"
) -> Iterator[tuple[str, list[int]]]:
    """vLLM's server with events of the pod ``name``: its URL, and the ports of its publisher."""
    ports = [free_port(), free_port()]
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports[0]}",
        "replay_endpoint": f"tcp://*:{ports[1]}",
        "topic": f"kv@{name}@tiny",
    }
    words = ["--kv-events-config", json.dumps(events), *options]
    with running_server(workplace, model, *words, config=config, port=free_port()) as url:
        yield url, ports


def complete(url: str, tokens: list[int], count: int = 4) -> None:
    """Asks for some tokens."""
    request = {"model": "tiny", "prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    body = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(request).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(body, timeout=120) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == count
