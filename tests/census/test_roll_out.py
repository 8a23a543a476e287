"""A bad roll-out among real workers, over one root and one etcd, under load: one command deletes its chunks.

``test_clearing.py`` tests each rule alone; here are processes, peers, local disks, queues of puts behind, commands.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

import kvstore
from kvstore import Layout
from kvstore.cli.app import app
from kvstore.client.cache import Cache
from tests.cli.conftest import serving
from tests.kit.etcd import eventually, running_etcd

pytestmark = pytest.mark.slow

LAYOUT = Layout(layers=2, kv_heads=2, head_dim=64, dtype="float16", chunk_tokens=32)
SIZE, CHUNKS, START_S = LAYOUT.chunk_tokens, 4, 60.0
PROMPTS = 16
"""Prompts of each roll-out before the clear; even ones are good, odd ones bad."""


def command(*arguments: str) -> Any:
    """Returns the --json output of a command that succeeds."""
    done = CliRunner().invoke(app, [*arguments, "--json"], prog_name="kvstore")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@contextmanager
def worker(root: Path, etcd: str, label: str, disk: Path) -> Iterator[str]:
    """A worker with memory and a local disk; its address."""
    options = "--listen 127.0.0.1:0 --memory 32MiB --sync-interval 100ms --log-level warning".split()
    where = ["--root", str(root), "--etcd", etcd, "--label", label, "--disk", f"{disk}:64MiB"]
    with serving(disk.parent, "worker", *where, *options) as running:
        yield running.grpc


def tokens(number: int) -> npt.NDArray[np.int64]:
    return np.arange(CHUNKS * SIZE) + number * 1_000_000


def kv(number: int, label: str) -> npt.NDArray[np.float16]:
    """Returns the KV that an engine of that roll-out computes for a prompt."""
    chance = np.random.default_rng([number, len(label)])
    shape = (LAYOUT.layers, 2, CHUNKS * SIZE, LAYOUT.kv_heads, LAYOUT.head_dim)
    made: npt.NDArray[np.float16] = chance.standard_normal(shape).astype(np.float16)
    return made


@dataclass
class Load:
    """An engine at one worker: it puts its own prompts and reads those of all, until it is stopped."""

    cache: Cache
    label: str
    first: int
    put: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        assert self._thread is not None
        self._thread.join(START_S)

    def _run(self) -> None:
        number = self.first
        while not self._stopped.wait(0.01):
            if self.cache.put(tokens(number), kv(number, self.label)).tokens_present == CHUNKS * SIZE:
                self.put.append(number)
            for each in (self.put[-1:] + self.put[:1]) if self.put else ():
                count, found = self.cache.get(tokens(each))
                if found.tobytes() != np.ascontiguousarray(kv(each, self.label)[:, :, :count]).tobytes():
                    self.wrong.append(each)
            number += 2


def served(cache: Cache, number: int, label: str) -> int:
    """Chunks that a worker gives of a prompt, which must be as that roll-out wrote them."""
    count, found = cache.get(tokens(number))
    assert found.tobytes() == np.ascontiguousarray(kv(number, label)[:, :, :count]).tobytes(), (number, label)
    return count // SIZE


def test_one_command_takes_back_what_a_bad_roll_out_wrote(tmp_root: Path) -> None:
    root = tmp_root / "root"
    root.mkdir()
    with ExitStack() as undo:
        etcd = undo.enter_context(running_etcd(tmp_root / "etcd")).endpoints
        at = {
            name: undo.enter_context(worker(root, etcd, name.partition("-")[0], tmp_root / name))
            for name in ("stable-1", "stable-2", "canary-1")
        }
        stores = {name: undo.enter_context(kvstore.connect(address)) for name, address in at.items()}
        caches = {name: store.namespace("m", LAYOUT) for name, store in stores.items()}
        for number in range(PROMPTS):
            name = "canary-1" if number % 2 else f"stable-{1 + number // 2 % 2}"
            caches[name].put(tokens(number), kv(number, name.partition("-")[0]))
        for cache in caches.values():  # from peers and the root into the memory of all
            for number in range(PROMPTS):
                eventually(lambda: served(cache, number, "canary" if number % 2 else "stable") == CHUNKS)  # noqa: B023

        good = Load(caches["stable-1"], "stable", 1000)
        bad = Load(caches["canary-1"], "canary", 2001)
        for load in (good, bad):
            load.start()
            undo.callback(load.stop)
        eventually(lambda: len(bad.put) >= 10 and len(good.put) >= 10)
        pins = list[kvstore.Pin]()

        def is_pinned() -> bool:
            """Chunks that their node writes behind are not on the root yet, where alone others can pin them."""
            pins.append(stores["stable-2"].namespace("m", LAYOUT).pin(tokens(1), ttl=300))
            return pins[-1].tokens == CHUNKS * SIZE

        eventually(is_pinned)
        with pins[-1]:
            bad.stop()  # drained first; its queue may still be writing
            shown = command("ls", "--lineage", "--root", str(root))
            assert {each["label"] for each in shown["writers"]} == {"stable", "canary"}
            arguments = ("clear", "--written-by", "label=canary", "--root", str(root), "--etcd", etcd)
            counted = command(*arguments, "--dry-run")
            assert counted["pinned"] == CHUNKS and counted["chunks"] >= (PROMPTS // 2 - 1) * CHUNKS
            cleared = command(*arguments, "--yes")
            assert cleared["pinned"] == CHUNKS and cleared["failed"] == 0 and cleared["unconfirmed"] == 0
            assert cleared["chunks"] >= counted["chunks"]

            put = [*good.put]
            for name, cache in caches.items():
                for number in [*range(1, PROMPTS, 2), *bad.put]:
                    expected = CHUNKS if number == 1 else 0
                    assert served(cache, number, "canary") == expected, (name, number)
                    assert cache.match(tokens(number)) == expected * SIZE, (name, number)
                for number in [*range(0, PROMPTS, 2), *put]:
                    assert served(cache, number, "stable") == CHUNKS, (name, number)
        assert command(*arguments, "--yes", "--pinned")["chunks"] == CHUNKS
        for cache in caches.values():
            assert served(cache, 1, "canary") == 0
        good.stop()
        assert good.wrong == [] and bad.wrong == []
        shown = command("ls", "--lineage", "--root", str(root))
        assert {each["label"] for each in shown["writers"]} == {"stable"}
        # What others compute again under those addresses stays.
        caches["stable-2"].put(tokens(1), kv(1, "stable"))
        for cache in caches.values():
            eventually(lambda: served(cache, 1, "stable") == CHUNKS)  # noqa: B023
    command("fsck", str(root))
