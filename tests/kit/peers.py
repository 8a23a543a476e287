"""The prompts of this folder's tests: small chunks whose bytes their tokens determine, and where their files are."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvstore
from kvstore import Layout
from kvstore.client import Cache, Store

CHECKOUT = Path(__file__).resolve().parents[2]
CHUNK = 4
LAYOUT = Layout(layers=2, kv_heads=2, head_dim=8, dtype="float16", chunk_tokens=CHUNK)
KvArray = npt.NDArray[Any]


def kv_of(tokens: Sequence[int], layout: Layout = LAYOUT, skip: int = 0) -> KvArray:
    """The KV of ``tokens`` after the first ``skip``; each token's is determined by it and all before it."""
    state, columns = hashlib.blake2b(), []
    shape = (layout.layers, 2, layout.kv_heads, layout.head_dim)
    for token in tokens:
        state.update(int(token).to_bytes(4, "little"))
        rng = np.random.default_rng(int.from_bytes(state.digest()[:8], "little"))
        columns.append(rng.integers(0, 256, (*shape, layout.numpy_dtype.itemsize), dtype=np.uint8))
    stacked = np.stack(columns[skip:], axis=2) if columns[skip:] else np.empty((*shape[:2], 0, *shape[2:], 2), np.uint8)
    return stacked.view(layout.numpy_dtype)[..., 0]


def is_kv_of(array: KvArray, tokens: Sequence[int], layout: Layout = LAYOUT) -> bool:
    """True if every byte is the one that the tokens determine."""
    return array.tobytes() == kv_of(tokens, layout).tobytes()


def prompt(number: int, chunks: int = 3) -> list[int]:
    """Returns a different prompt for each number."""
    return [number * 1_000 + position for position in range(chunks * CHUNK)]


def cache_of(store: Store, name: str = "model") -> Cache:
    """The namespace that these tests share."""
    return store.namespace(name, LAYOUT)


def open_cache(root: Path | str) -> tuple[Store, Cache]:
    """Opens a separate store, which remembers nothing, and its cache."""
    store = kvstore.open(str(root))
    return store, cache_of(store)


def files_under(folder: Path) -> list[Path]:
    """All files under a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def command(function: str, *arguments: object, before: Sequence[str] = ()) -> list[str]:
    """Returns a command that calls a function of ``tests.peers.processes`` in a separate process."""
    call = f"from tests.peers.processes import {function}; {function}({', '.join(map(repr, arguments))})"
    return [*before, sys.executable, "-c", call]


def start(function: str, *arguments: object, before: Sequence[str] = (), **environment: str) -> subprocess.Popen[str]:
    """Starts that process; standard output and input are pipes."""
    return subprocess.Popen(
        command(function, *arguments, before=before),
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], said: str | None = None) -> str:
    """Waits for a process, which must succeed; returns its output since the last call."""
    try:
        printed, _ = process.communicate(said, timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == 0, printed
    return printed
