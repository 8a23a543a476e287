"""A process that stores new prompts at a given rate: ``python -m tests.chaos.writer``. Backs off if told to."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import time

import numpy as np

import kvstore
from kvstore import Layout
from kvstore.errors import KVStoreError

LAYOUT = Layout(layers=8, kv_heads=4, head_dim=128, dtype="int8", chunk_tokens=32)
PROMPT_CHUNKS = 16
PROMPT_BYTES = PROMPT_CHUNKS * LAYOUT.chunk_bytes
BACKOFF_S = 0.02


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--etcd", required=True)
    parser.add_argument("--rate", type=float, required=True)
    given = parser.parse_args()
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    tokens = np.zeros(PROMPT_CHUNKS * LAYOUT.chunk_tokens, np.uint32)
    kv = np.random.default_rng(1).integers(-128, 128, LAYOUT.shape(len(tokens)), np.int8)
    puts = shed = 0
    due_s = time.monotonic()
    with kvstore.open(given.root, given.etcd) as store:
        cache = store.namespace("filling", LAYOUT)
        for number in itertools.count():
            tokens[0], tokens[1] = os.getpid(), number
            try:
                is_stored = not cache.put(tokens, kv).reason
            except KVStoreError:
                is_stored = False
            puts += is_stored
            if not is_stored:
                shed += 1
                time.sleep(BACKOFF_S)
            now_s = time.monotonic()
            due_s = max(due_s + PROMPT_BYTES / given.rate, now_s)
            time.sleep(due_s - now_s)
            if asked:
                break
    print(json.dumps({"puts": puts, "shed": shed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
