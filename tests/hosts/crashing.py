"""A host that is cut off while it puts: ``python -m tests.hosts.crashing write|check DURABILITY WRITE FOLDER``.

``write`` puts prompts with a disk tier and says in FOLDER, outside the host's disk, which were acknowledged and when;
``check`` opens the root again after the crash and prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import kvstore

ROOT, TIER = "/mnt/disk/root", "/mnt/disk/tier"
TOKENS = 64
LAYOUT = kvstore.Layout(layers=2, kv_heads=2, head_dim=64, chunk_tokens=TOKENS)
MEMORY_BYTES, TIER_BYTES = 16 << 20, 64 << 20
BOUND_BYTES = 256 << 20
PROMPTS_MAX = 100_000


def tokens(seed: int) -> list[int]:
    return [seed * 1000 + at for at in range(TOKENS)]


def opened(durability: str, write: str) -> kvstore.Store:
    return kvstore.open(
        ROOT,
        durability=durability,
        write=write,
        memory=MEMORY_BYTES,
        disk=(TIER, TIER_BYTES),
        max_bytes=BOUND_BYTES,
    )


def put_until_the_end(durability: str, write: str, folder: Path) -> None:
    with opened(durability, write) as store, (folder / "acks").open("a") as acks:
        cache = store.namespace("model", LAYOUT)
        for seed in range(PROMPTS_MAX):
            try:
                result = cache.put(tokens(seed), np.full(LAYOUT.shape(TOKENS), seed % 251, LAYOUT.numpy_dtype))
            except kvstore.errors.Overloaded:
                time.sleep(0.05)
                continue
            if result.tokens_present == TOKENS:
                acks.write(f"{seed} {time.time():.3f}\n")
                acks.flush()


def check(durability: str, write: str, folder: Path) -> None:
    acked = [line.split() for line in (folder / "acks").read_text().splitlines()]
    lost_s, wrong = [], 0
    cut_s = float(acked[-1][1])
    with opened(durability, write) as store:
        cache = store.namespace("model", LAYOUT)
        for seed, at_s in acked:
            count, found = cache.get(tokens(int(seed)))
            if count != TOKENS:
                lost_s.append(cut_s - float(at_s))
            elif not (np.asarray(found) == int(seed) % 251).all():
                wrong += 1
    figures = {"acked": len(acked), "lost": len(lost_s), "oldest_lost_s": round(max(lost_s, default=0.0), 2)}
    print(json.dumps({**figures, "over_s": round(cut_s - float(acked[0][1]), 1), "wrong": wrong}), flush=True)
    os.sync()


if __name__ == "__main__":
    phase, durability, write, folder = sys.argv[1:]
    (put_until_the_end if phase == "write" else check)(durability, write, Path(folder))
