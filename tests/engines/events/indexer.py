"""NVIDIA Dynamo's own indexer as a child process: the consumer that our events are for. No GPU, no engine."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[3]
PYTHON = REPOSITORY / ".cache/engines/events/bin/python"
MODEL = "tiny"
BLOCK_TOKENS = 32
SUBSCRIBED_S = 5.0


class Indexer:
    """One indexer. Instances are numbers; a stream is heard for one instance and one rank of it."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def register(self, instance: int, publish: int, replay: int | None, *, rank: int = 0) -> None:
        """Subscribes to a stream on ports of loopback."""
        told: dict[str, Any] = {"instance_id": instance, "model_name": MODEL, "block_size": BLOCK_TOKENS}
        told |= {"endpoint": f"tcp://127.0.0.1:{publish}", "dp_rank": rank}
        if replay is not None:
            told["replay_endpoint"] = f"tcp://127.0.0.1:{replay}"
        self.call("/register", told)
        # It answers before it has subscribed. What is published until then is lost to it, and missed at the next event.
        ends_s = time.monotonic() + SUBSCRIBED_S
        while not _has_subscriber(publish) and time.monotonic() < ends_s:  # a stream may also begin later
            time.sleep(0.02)

    def tokens(self, tokens: Sequence[int], tier: str = "disk") -> dict[int, int]:
        """Leading tokens that each instance has; ``tier`` counts the memories before it too, as Dynamo does."""
        found = self.call("/query", {"token_ids": list(tokens), "model_name": MODEL})["instances"]
        return {int(name): each[tier] for name, each in found.items()}

    def blocks(self, tier: str = "disk") -> dict[int, Counter[int]]:
        """Hashes of the blocks of each instance."""
        found: dict[int, Counter[int]] = {}
        for model in self.call("/dump").values():
            for each in model["events"]:
                if each["storage_tier"] == tier:
                    stored = each["event"]["data"]["stored"]["blocks"]
                    found.setdefault(each["worker_id"], Counter()).update(block["block_hash"] for block in stored)
        return found

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer to a request, from JSON."""
        request = urllib.request.Request(
            f"{self._url}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            text = answer.read()
        return json.loads(text) if text[:1] in (b"{", b"[") else text


@contextmanager
def running_indexer(folder: Path) -> Iterator[Indexer]:
    """An indexer that takes requests, killed at the end."""
    port = free_port()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    with open(folder / f"indexer-{port}.log", "wb") as log:
        child = subprocess.Popen(
            [str(PYTHON), "-m", "dynamo.indexer", "--port", str(port), "--block-size", str(BLOCK_TOKENS)],
            stdout=log,
            stderr=log,
            cwd=folder,
            env=environment,
        )
    indexer = Indexer(port)
    try:
        eventually(lambda: is_up(indexer, child), "the indexer answers")
        yield indexer
    finally:
        child.kill()
        child.wait()


def is_up(indexer: Indexer, child: subprocess.Popen[bytes]) -> bool:
    """True once it answers. Fails if it ended."""
    assert child.poll() is None, "the indexer ended"
    try:
        indexer.call("/health")
    except (urllib.error.URLError, ConnectionError):
        return False
    return True


def _has_subscriber(port: int) -> bool:
    """True if somebody is connected to a port of loopback."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(state == "01" and int(local[-4:], 16) == port for _, local, _, state, *_ in map(str.split, lines))
