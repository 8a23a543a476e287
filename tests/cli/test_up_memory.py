"""``kvstore up --memory --disk``: acknowledged chunks are on the root when it has ended, and nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

import kvstore
from tests.cli.conftest import eventually, serving

pytestmark = pytest.mark.slow

LAYOUT = kvstore.Layout(layers=2, kv_heads=2, head_dim=32, dtype="float16", chunk_tokens=16)
CHUNKS = 400


def test_w3_sigterm_right_after_a_put_behind_loses_nothing(tmp_root: Path, run: Callable[..., Result]) -> None:
    root, disk = tmp_root / "root", tmp_root / "disk"
    tokens = np.arange(CHUNKS * LAYOUT.chunk_tokens)
    kv = np.random.default_rng(1).standard_normal(LAYOUT.shape(len(tokens)), np.float32).astype(np.float16)
    at = ("--root", str(root), "--listen", "127.0.0.1:0", "--memory", "32MiB", "--disk", f"{disk}:64MiB")
    with serving(tmp_root, "up", *at) as running:
        with kvstore.connect(running.grpc) as store:
            cache = store.namespace("model", LAYOUT)
            assert cache.put(tokens, kv).tokens_present == len(tokens)
            count, got = cache.get(tokens)
            assert count == len(tokens) and np.array_equal(got, kv)
            eventually(lambda: store.stats()["memory_bytes"] == kv.nbytes, "the worker hears what was read")
            assert store.stats()["memory_hits"] == CHUNKS
        said = run("stats", "--connect", running.grpc).stdout
        assert "memory_hits" in said and "memory_bytes" in said
        assert running.end() == 0
    assert os.listdir(root / "staging") == []
    with kvstore.open(str(root)) as store:
        count, got = store.namespace("model", LAYOUT).get(tokens)
        assert count == len(tokens) and np.array_equal(got, kv)
