"""The other processes of these tests; each function runs in a separate process, and prints what it saw."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.kit.peers import is_kv_of, kv_of, open_cache, prompt


def put_and_read_back(root: str, first: int, count: int, pretend_pid: int = 0) -> None:
    """Puts prompts, each fully, once told to on standard input; then reads all of them back."""
    if pretend_pid:
        pretended: Callable[[], int] = lambda: pretend_pid  # noqa: E731
        os.getpid = pretended
    store, cache = open_cache(root)
    with store:
        print("ready", flush=True)
        sys.stdin.readline()
        short = sum(
            cache.put(tokens := prompt(n), kv_of(tokens)).tokens_present != 12 for n in range(first, first + count)
        )
        missed = wrong = 0
        for number in range(first, first + count):
            matched, kv = cache.get(prompt(number))
            missed += matched != 12
            wrong += not is_kv_of(kv, prompt(number)[:matched])
        failed = {
            name: n for name, n in store.stats().items() if n and (name.startswith("damage_") or name == "put_failed")
        }
    print(json.dumps({"pid": os.getpid(), "short": short, "missed": missed, "wrong": wrong, "failed": failed}))


def poll(root: str, count: int) -> None:
    """Reads all prompts again and again until all are there in full, as somebody waiting for them would."""
    store, cache = open_cache(root)
    with store:
        print("ready", flush=True)
        wrong, seen, give_up_s = 0, 0, time.monotonic() + 60
        while seen < count and time.monotonic() < give_up_s:
            seen = 0
            for number in range(count):
                matched, kv = cache.get(prompt(number))
                wrong += not is_kv_of(kv, prompt(number)[:matched])
                seen += matched == 12
        damaged = store.stats()["miss_damaged"]
    print(json.dumps({"wrong": wrong, "seen": seen, "damaged": damaged}))


def put_and_die(root: str, number: int) -> None:
    """Puts one prompt, begins another, and ends without closing anything."""
    _, cache = open_cache(root)
    cache.put(prompt(number), kv_of(prompt(number)))
    (Path(root) / "staging" / "dead").mkdir()
    (Path(root) / "staging" / "dead" / "0.part").write_bytes(b"half a chunk")
    os._exit(0)
