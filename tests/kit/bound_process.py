"""A process that writes into a bounded folder: ``python -m tests.kit.bound_process FOLDER MAX_BYTES START_S``.

It puts new prompts as fast as it can, and says "begun" after the first. It answers "stats" with whether it runs the
collector and how many prompts it stored. At "end" it closes the store and says "done"; at "exit" it ends at once.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import numpy as np

import kvstore
from kvstore.node import collecting

LAYOUT = kvstore.Layout(layers=4, kv_heads=4, head_dim=128, dtype="int8", chunk_tokens=64)
CHUNKS = 4
PROMPT_BYTES = CHUNKS * (LAYOUT.chunk_bytes + 8192)
"""With headers."""
BACKOFF_S = 0.01


def tokens(writer: int, number: int) -> list[int]:
    return [writer << 16 | number, *range(CHUNKS * LAYOUT.chunk_tokens - 1)]


def kv() -> np.ndarray:
    return np.ones(LAYOUT.shape(CHUNKS * LAYOUT.chunk_tokens), np.int8)


def write(cache: kvstore.Cache, ended: threading.Event, stored: list[int]) -> None:
    while not ended.is_set():
        if cache.put(tokens(os.getpid() & 0xFFFF, len(stored)), kv()).reason:
            time.sleep(BACKOFF_S)
        else:
            stored.append(1)


def main(folder: str, max_bytes: str, start_s: str) -> None:
    collecting.START_S = float(start_s)
    bound: Any = int(max_bytes) if max_bytes.isdecimal() else max_bytes
    store = kvstore.open(folder, max_bytes=bound, shard_bits=2)
    ended, stored = threading.Event(), list[int]()
    cache = store.namespace("model", LAYOUT)
    writer = threading.Thread(target=write, args=(cache, ended, stored), daemon=True)
    writer.start()
    while not stored:
        time.sleep(BACKOFF_S)
    print("begun", flush=True)
    for line in sys.stdin:
        match line.strip():
            case "stats":
                print(int(store.stats()["collecting"]), len(stored), flush=True)
            case "exit":
                os._exit(0)
            case "end":
                break
    ended.set()
    writer.join()
    store.close()
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
