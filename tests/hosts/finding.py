"""One host stores prompts, and another finds them: ``python -m tests.hosts.finding writer|reader``, one guest each.

The reader looks for half of the prompts before they are there, so that its client remembers that they are absent. Both
talk through files outside the export. The reader prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

import kvstore
from kvstore.client.cache import Cache
from tests.kit.patience import eventually

ROOT = "/mnt/nfs/root"
TOKENS = 64
LAYOUT = kvstore.Layout(layers=2, kv_heads=1, head_dim=16, chunk_tokens=TOKENS)
PROMPTS = 24
LIMIT_S = 60.0
POLL_S = 0.05


def tokens(seed: int) -> list[int]:
    return [seed * 1000 + at for at in range(TOKENS)]


def kv(seed: int) -> np.ndarray:
    return np.full(LAYOUT.shape(TOKENS), seed, LAYOUT.numpy_dtype)


def wait(path: Path) -> None:
    eventually(path.exists, path.name, LIMIT_S)


def write(cache: Cache, work: Path) -> None:
    assert cache.put(tokens(0), kv(0)).tokens_present == TOKENS
    (work / "begun").touch()
    wait(work / "looked")
    for seed in range(1, PROMPTS + 1):
        cache.put(tokens(seed), kv(seed))
        (work / f"put.{seed}.part").write_text(str(time.time()))
        (work / f"put.{seed}.part").rename(work / f"put.{seed}")
        time.sleep(0.2)
    wait(work / "found")


def read(cache: Cache, work: Path) -> None:
    wait(work / "begun")
    assert cache.get(tokens(0))[0] == TOKENS  # the first of its kind takes longer
    for seed in range(1, PROMPTS + 1, 2):
        assert cache.match(tokens(seed)) == 0
    (work / "looked").touch()
    found_s: dict[int, float] = {}
    ends_s = time.monotonic() + LIMIT_S
    while len(found_s) < PROMPTS and time.monotonic() < ends_s:
        for seed in range(1, PROMPTS + 1):
            if seed not in found_s and (work / f"put.{seed}").exists() and cache.match(tokens(seed)) == TOKENS:
                found_s[seed] = time.time()
        time.sleep(POLL_S)
    (work / "found").touch()
    after_s = [round(at_s - float((work / f"put.{seed}").read_text()), 2) for seed, at_s in sorted(found_s.items())]
    wrong = 0
    for seed in found_s:
        count, found = cache.get(tokens(seed))
        wrong += count != TOKENS or not (np.asarray(found) == seed).all()
    print(json.dumps({"after_s": after_s, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    role, work = sys.argv[1], Path(sys.argv[2])
    with kvstore.open(ROOT) as store:
        (write if role == "writer" else read)(store.namespace("model", LAYOUT), work)
