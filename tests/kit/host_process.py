"""A process with an embedded store: ``python -m tests.kit.host_process FOLDER ROLE [MAX_BYTES]``.

It prints "begun", and then answers lines of its standard input. The roles are "holds" and "pins", of the first prompt,
and "writes", which puts new prompts as fast as it can: it answers "stats" with whether its child collects and how many
prompts it stored. "end" makes each of them end orderly and print "done".
"""

from __future__ import annotations

import os
import sys
import threading
import time

import numpy as np

import kvstore
from kvstore.errors import Overloaded

LAYOUT = kvstore.Layout(layers=2, kv_heads=1, head_dim=64, dtype="float16", chunk_tokens=4)
TOKENS_COUNT = 16
LARGE = kvstore.Layout(layers=4, kv_heads=4, head_dim=128, dtype="int8", chunk_tokens=64)
LARGE_CHUNKS = 4
PROMPT_BYTES = LARGE_CHUNKS * (LARGE.chunk_bytes + 8192)
"""The files of a large prompt, with headers."""
BACKOFF_S = 0.01


def tokens(prompt: int) -> list[int]:
    return [1000 * prompt + number for number in range(TOKENS_COUNT)]


def kv(prompt: int) -> np.ndarray:
    return np.full((2, 2, TOKENS_COUNT, 1, 64), prompt, np.float16)


def large_tokens(writer: int, number: int) -> list[int]:
    return [writer << 16 | number, *range(LARGE_CHUNKS * LARGE.chunk_tokens - 1)]


def large_kv() -> np.ndarray:
    return np.ones(LARGE.shape(LARGE_CHUNKS * LARGE.chunk_tokens), np.int8)


def write(cache: kvstore.Cache, ended: threading.Event, stored: list[int]) -> None:
    while not ended.is_set():
        try:
            cache.put(large_tokens(os.getpid() & 0xFFFF, len(stored)), large_kv())
            stored.append(1)
        except Overloaded:
            time.sleep(BACKOFF_S)


def main(folder: str, role: str, max_bytes: str = "") -> None:
    ended, stored = threading.Event(), list[int]()
    with kvstore.open(folder, max_bytes=int(max_bytes) if max_bytes else "auto", shard_bits=2) as store:
        writer, held = None, None
        if role == "writes":
            cache = store.namespace("large", LARGE)
            writer = threading.Thread(target=write, args=(cache, ended, stored), daemon=True)
            writer.start()
        else:
            cache = store.namespace("model", LAYOUT)
            cache.put(tokens(1), kv(1))
            held = cache.hold(tokens(1)) if role == "holds" else None
            if role == "pins":
                assert cache.pin(tokens(1), ttl=3600, owner="child").tokens == TOKENS_COUNT
        print("begun", flush=True)
        while sys.stdin.readline().strip() == "stats":
            print(int(store.stats()["collecting"]), len(stored), flush=True)
        ended.set()
        if writer is not None:
            writer.join()
        if held is not None:
            assert len(held.view()) == TOKENS_COUNT // LAYOUT.chunk_tokens
            held.release()
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
