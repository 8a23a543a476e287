"""``kvstore events`` beside real etcd, nodes and collectors: kill -9, subscribers cut off, questions over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.client.cache import Cache
from kvstore.format import places
from tests.cli.conftest import KVSTORE, Running, serving
from tests.events.subscriber import Subscriber
from tests.kit.collecting import GC, bounded_to
from tests.kit.etcd import running_etcd
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.ports import free_port
from tests.kit.programs import ended
from tests.kit.stores import TINY


@pytest.fixture(scope="module")
def etcd(module_root: Path) -> Iterator[str]:
    with running_etcd(module_root / "etcd") as server:
        yield server.endpoints


@pytest.fixture
def root(tmp_root: Path) -> Path:
    return tmp_root / "root"


@contextmanager
def publishing(root: Path, etcd: str, publish: int = 0, replay: int = 0) -> Iterator[Running]:
    endpoints = ("--publish", f"tcp://*:{publish}", "--replay", f"tcp://*:{replay}")
    with serving(root.parent, "events", "--root", str(root), "--etcd", etcd, *endpoints) as running:
        yield running


def tokens_of(seed: int, chunks: int = 5) -> Any:
    return np.random.default_rng(seed).integers(0, 50_000, chunks * TINY.chunk_tokens, np.uint32)


def store(cache: Cache, seed: int) -> None:
    tokens = tokens_of(seed)
    cache.put(tokens, np.zeros(TINY.shape(len(tokens)), np.int8))


def on_root(root: Path) -> set[int]:
    """The low 64 bits of the addresses of all chunk files."""
    names = (each.name for each in (root / "chunks").glob("*/*"))
    return {int(name.partition(".")[0][16:], 16) for name in names if places.parse_chunk(name)}


def collect(root: Path, etcd: str, max_bytes: int) -> None:
    ended(*GC, "--root", str(root), "--etcd", etcd, "--once", *bounded_to(max_bytes), check=True)


def test_an_index_is_right_again_after_kills_cuts_and_clears(root: Path, etcd: str) -> None:
    with kvstore.open(root, etcd=etcd) as opened:
        cache, ports = opened.namespace("m", TINY), (free_port(), free_port())
        for seed in range(6):
            store(cache, seed)
        with publishing(root, etcd, *ports) as first:
            subscriber = Subscriber(first.said["publish"], first.said["replay"])
            with closing(subscriber):
                eventually(lambda: len(subscriber.hashes) == 30 and subscriber.hashes == on_root(root))
                size = sum(each.stat().st_size for each in (root / "chunks").glob("*/*"))
                collect(root, etcd, size // 2)
                assert 0 < len(on_root(root)) < 30
                eventually(lambda: subscriber.hashes == on_root(root))
                first.end(signal.SIGKILL)
                cache.clear()
                store(cache, 100)
                with publishing(root, etcd, *ports):
                    eventually(lambda: subscriber.hashes == on_root(root) and len(subscriber.hashes) == 5)
                    late = Subscriber(first.said["publish"], first.said["replay"])
                    with closing(late):
                        eventually(lambda: late.hashes == on_root(root))
                    assert late.replays
                    shutil.rmtree(next(each for each in (root / "chunks").iterdir() if any(each.iterdir())))
                    eventually(lambda: subscriber.hashes <= on_root(root))


def test_a_root_of_a_cluster_needs_its_etcd(root: Path, etcd: str) -> None:
    kvstore.open(root, etcd=etcd).close()
    without = {name: value for name, value in os.environ.items() if name != "KVSTORE_ETCD"}
    done = ended(*KVSTORE, "events", "--root", str(root), "--publish", "tcp://*:0", env=without)
    assert (done.returncode, done.stdout) == (2, "") and "give --etcd ENDPOINTS" in done.stderr, done


def test_questions_are_answered_as_match_does(root: Path, etcd: str) -> None:
    with kvstore.open(root, etcd=etcd) as opened:
        cache = opened.namespace("m", TINY)
        for seed in range(4):
            store(cache, seed)
        with publishing(root, etcd) as running:
            eventually(lambda: all(ask(running, tokens_of(seed))["longest_matched"] == 20 for seed in range(4)))
            for seed in range(8):
                prompt = np.concatenate([tokens_of(seed)[: 3 + 2 * seed], tokens_of(99)])
                assert ask(running, prompt)["longest_matched"] == cache.match(prompt)
            assert answer(running, {"model": "m", "tenant": "other", "token_ids": [1] * 8})["longest_matched"] == 0
            with pytest.raises(urllib.error.HTTPError, match="400"):
                answer(running, {})


def test_publisher_of_up_answers_for_puts_through_its_worker(root: Path) -> None:
    words = ("up", "--root", str(root), "--listen", "127.0.0.1:0", "--memory", "64MiB")
    with serving(root.parent, *words, "--write", "through", "--events", "tcp://*:0") as running:
        with kvstore.connect(running.grpc) as connected:
            store(connected.namespace("m", TINY), 1)
        subscriber = Subscriber(running.said["publish"], running.said["replay"])
        with closing(subscriber):
            eventually(lambda: len(subscriber.hashes) == 5 and subscriber.hashes == on_root(root))
        said = ask(running, tokens_of(1))
        assert (said["longest_matched"], said["blocks"], said["block_size"]) == (20, 5, 4)
        assert said["instances"]["kvstore"]["STORAGE"] == 20


def ask(running: Running, tokens: Any) -> Any:
    return answer(running, {"model_name": "m", "token_ids": tokens.tolist()})


def answer(running: Running, question: dict[str, Any]) -> Any:
    request = urllib.request.Request(f"http://{running.said['query']}/query", json.dumps(question).encode())
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answered:
        return json.load(answered)
