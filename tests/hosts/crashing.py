"""A host that puts until a power cut: ``python -m tests.hosts.crashing write|check DURABILITY WRITE FOLDER [ROOT]``.

``write`` puts prompts, and lists in FOLDER, outside the host's disk, which were acknowledged and when. It ends when the
host loses power, or when there is FOLDER/ends. ``check`` opens the root again after the cut, reads every prompt that
was acknowledged, repairs the root, and prints one JSON object. A root on the host's own disk has a disk tier beside it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import kvstore
from kvstore.cli.selectors import identified
from kvstore.core.write_mode import Durability, WriteMode
from kvstore.fsck import Options, fsck

ON_DISK, TIER = "/mnt/disk/root", "/mnt/disk/tier"
ON_NFS = "/mnt/nfs/root"
TOKENS = 64
LAYOUT = kvstore.Layout(layers=2, kv_heads=2, head_dim=64, chunk_tokens=TOKENS)
MEMORY_BYTES, TIER_BYTES = 16 << 20, 64 << 20
BOUND_BYTES = 256 << 20
PROMPTS_MAX = 100_000


def tokens(seed: int) -> list[int]:
    return [seed * 1000 + at for at in range(TOKENS)]


def opened(root: str, durability: Durability, write: WriteMode) -> kvstore.Store:
    if root == ON_NFS:  # one process, without etcd: nobody bounds it
        return kvstore.open(root, durability=durability, write=write)
    disk = (TIER, TIER_BYTES)
    return kvstore.open(root, durability=durability, write=write, memory=MEMORY_BYTES, disk=disk, max_bytes=BOUND_BYTES)


def put_until_the_end(store: kvstore.Store, folder: Path) -> None:
    cache = store.namespace("model", LAYOUT)
    with (folder / "acks").open("a") as acks:
        for seed in range(PROMPTS_MAX):
            if (folder / "ends").exists():
                return
            try:
                result = cache.put(tokens(seed), np.full(LAYOUT.shape(TOKENS), seed % 251, LAYOUT.numpy_dtype))
            except kvstore.errors.Unavailable:
                time.sleep(0.05)
                continue
            if result.tokens_present == TOKENS:
                acks.write(f"{seed} {time.time():.3f}\n")
                acks.flush()
            elif result.reason:
                time.sleep(0.05)


def check(store: kvstore.Store, folder: Path) -> dict[str, float]:
    acked = [line.split() for line in (folder / "acks").read_text().splitlines()]
    lost_s, wrong = [], 0
    cut_s = float(acked[-1][1])
    cache = store.namespace("model", LAYOUT)
    for seed, at_s in acked:
        count, found = cache.get(tokens(int(seed)))
        if count != TOKENS:
            lost_s.append(cut_s - float(at_s))
        elif not (np.asarray(found) == int(seed) % 251).all():
            wrong += 1
    figures = {"acked": len(acked), "lost": len(lost_s), "oldest_lost_s": round(max(lost_s, default=0.0), 2)}
    return {**figures, "over_s": round(cut_s - float(acked[0][1]), 1), "wrong": wrong}


def repaired(root: str) -> dict[str, int]:
    """Checks and repairs the root, and checks it again; returns what each check found that is no leftover."""
    found = {}
    with identified(root, {}) as (opened, identity):
        for name in ("damaged", "after_repair"):
            report = fsck(opened, identity, Options(repair=name == "damaged"))
            found[name] = sum(not finding.is_leftover for finding in report.findings)
    return found


def main() -> None:
    phase, durability, write, folder, root = (*sys.argv[1:], ON_DISK)[:5]
    with opened(root, Durability.of(durability), WriteMode.of(write)) as store:
        if phase == "write":
            put_until_the_end(store, Path(folder))
            return
        figures = check(store, Path(folder))
    print(json.dumps({**figures, **repaired(root)}), flush=True)
    os.sync()


if __name__ == "__main__":
    main()
