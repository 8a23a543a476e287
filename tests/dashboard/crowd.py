"""Load on a cluster for the dashboard to show: chats over shared prompts, pins, and hostile names."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

import kvstore
from kvstore.client.store import Store
from kvstore.errors import KVStoreError
from tests.kit.patience import PATIENCE_S

LAYOUT = kvstore.Layout(layers=4, kv_heads=2, head_dim=64, dtype="float16", chunk_tokens=16)
SCRIPT = "<script>window.hostile=1</script>"
IMAGE = '"><img src=x onerror="window.hostile=1">'
TURNED = "\u202egnitirw\u202c-right-to-left"
LONG = "very-long-" + "x" * 230
NAMES = (
    ("llama-3.1-8b", "acme", 8),
    ("llama-3.1-8b", "globex", 3),
    ("qwen2.5-32b", "acme", 4),
    (SCRIPT, IMAGE, 1),
    (TURNED, "اختبار", 1),
    (LONG, "t" * 200, 1),
)
OWNERS = ("host-a/engine-1", "nightly-batch", IMAGE, TURNED, "o" * 200)


class Crowd:
    """Users of a store, from one seed."""

    def __init__(self, store: Store, seed: int = 7) -> None:
        self._draw = random.Random(seed)
        self._caches = [
            store.namespace(name, LAYOUT, fingerprint=f"sha256:{number:064x}", tenant=tenant)
            for number, (name, tenant, _) in enumerate(NAMES)
        ]
        self._systems = [[self._draw.randrange(32_000) for _ in range(16 * size)] for size in (10, 20, 40) * 2]
        self._chats: list[tuple[int, list[int]]] = []

    def turn(self) -> None:
        """One request: a new chat, or the next turn of one."""
        number, tokens = self._next()
        cache = self._caches[number]
        count, _ = cache.get(tokens)
        if count < len(tokens):
            shape = LAYOUT.shape(len(tokens) - count)
            cache.put(tokens, np.random.default_rng(count).integers(0, 9, shape).astype(np.float16), prefix=count)

    def pin(self, owner: str) -> None:
        """Pins a prompt that somebody stored, for an hour or more."""
        number, tokens = self._draw.choice(self._chats)
        self._caches[number].pin(tokens, ttl=self._draw.choice((3_600, 86_400)), owner=owner)

    def _next(self) -> tuple[int, list[int]]:
        draw = self._draw
        if self._chats and draw.random() < 0.6:
            at = draw.randrange(len(self._chats))
            number, before = self._chats[at]
            tokens = before + [draw.randrange(32_000) for _ in range(draw.choice((32, 64, 128)))]
            if len(tokens) < 1_600:
                self._chats[at] = (number, tokens)
                return number, tokens
        number = draw.choices(range(len(NAMES)), [weight for *_, weight in NAMES])[0]
        system = self._systems[(2 * number + draw.randrange(2)) % len(self._systems)]
        chat = (number, system + [draw.randrange(32_000) for _ in range(draw.choice((32, 96, 208)))])
        self._chats.append(chat)
        return chat


@contextmanager
def busy(store: Store) -> Iterator[Crowd]:
    """A crowd with a past, which continues until the block ends."""
    crowd, ended = Crowd(store), threading.Event()
    for _ in range(150):
        with suppress(KVStoreError):  # such as a root that is full for a moment: the page shall show that too
            crowd.turn()
    for owner in OWNERS:
        crowd.pin(owner)

    def go_on() -> None:
        while not ended.wait(0.03):
            with suppress(KVStoreError):
                crowd.turn()

    thread = threading.Thread(target=go_on, name="kvstore-test-crowd", daemon=True)
    thread.start()
    try:
        yield crowd
    finally:
        ended.set()
        thread.join(PATIENCE_S)


def age(root: Path, seed: int = 7) -> None:
    """Makes some chunks look unused for a while, so that not all are equally hot."""
    draw = random.Random(seed)
    for folder in sorted((root / "chunks").iterdir()):
        for file in folder.iterdir():
            back_ns = draw.choice((0, 0, 5, 30, 600, 3_000)) * 60 * 1_000_000_000
            if back_ns:
                try:
                    mtime_ns = file.stat().st_mtime_ns - back_ns
                    os.utime(file, ns=(mtime_ns, mtime_ns))
                except FileNotFoundError:
                    continue  # collected meanwhile


def damage(root: Path, count: int) -> None:
    """Turns bits in some chunks that are on the root, without changing when they were used."""
    files = [file for folder in sorted((root / "chunks").iterdir()) for file in folder.iterdir()]
    for file in random.Random(3).sample(files, min(count, len(files))):
        try:
            status = file.stat()
            with open(file, "r+b") as opened:
                opened.seek(-1, os.SEEK_END)
                last = opened.read(1)
                opened.seek(-1, os.SEEK_END)
                opened.write(bytes([last[0] ^ 0xFF]))
            os.utime(file, ns=(status.st_mtime_ns, status.st_mtime_ns))
        except FileNotFoundError:
            continue
