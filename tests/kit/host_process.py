"""A process with an embedded store: ``python -m tests.kit.host_process FOLDER WHAT``. It says "begun", and stays.

A line on its standard input makes it let go, say "done" and end.
"""

from __future__ import annotations

import sys

import numpy as np

import kvstore

LAYOUT = kvstore.Layout(layers=2, kv_heads=1, head_dim=64, dtype="float16", chunk_tokens=4)
TOKENS_COUNT = 16


def tokens(prompt: int) -> list[int]:
    return [1000 * prompt + number for number in range(TOKENS_COUNT)]


def kv(prompt: int) -> np.ndarray:
    return np.full((2, 2, TOKENS_COUNT, 1, 64), prompt, np.float16)


def main(folder: str, what: str) -> None:
    with kvstore.open(folder) as store:
        cache = store.namespace("model", LAYOUT)
        cache.put(tokens(1), kv(1))
        held = cache.hold(tokens(1)) if what == "holds" else None
        if what == "pins":
            assert cache.pin(tokens(1), ttl=3600, owner="child").tokens == TOKENS_COUNT
        print("begun", flush=True)
        sys.stdin.readline()
        if held is not None:
            assert len(held.view()) == TOKENS_COUNT // LAYOUT.chunk_tokens
            held.release()
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
