"""KV events against the root: for how long a router's index has entries too many and too few, whatever is killed.

Hypothesis: what the index has and the root has not is gone from it within 2 s, and the index is the root's listing
again within 10 s of the return of whatever was killed or cut off.

    python -m benchmarks.promise --trace mooncake_conversation_trace.jsonl [--requests 200] [--rate 4]

An engine that hashes its blocks itself stores the prompts of a trace through a worker, again and again, while a
collector keeps a quarter of them. Ten times a second the root is listed and compared with the index of one subscriber.
Each line is an act: the most entries too many and too few at once, and how long the slowest of them stayed wrong; of
those too few since the return of what was killed. ``right again`` is the time from the last put to an index that is the
root's listing. A block that a sweep has condemned is a miss for every node before its file goes (gc/PROTOCOL.md, H1),
so it counts as too few.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import zmq

import kvstore
from kvstore.address import block_address
from kvstore.client.cache import Cache
from kvstore.errors import KVStoreError
from kvstore.format.header import Descent
from kvstore.meta.embedded_etcd import EmbeddedEtcd
from kvstore.replay.trace import BLOCK_TOKENS, Request, load_trace

LAYOUT = kvstore.Layout(layers=1, kv_heads=1, head_dim=1, dtype="int8", chunk_tokens=BLOCK_TOKENS)
BLOCK_BYTES = 2_048
FILE_BYTES = 4_096 + BLOCK_BYTES
SAMPLE_S = 0.1
QUIET_S = 20.0
"""The longest wait for an index that is right."""
LOAD_S = 5.0
"""How long each act is watched while prompts are stored."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The full blocks of a request: keys as vLLM makes them, and their packed descents."""

    keys: list[bytes]
    descents: list[bytes]

    @classmethod
    def of(cls, request: Request) -> Prompt:
        """Equal leading ids give equal leading blocks."""
        hashed, keys, descents = b"", list[bytes](), list[bytes]()
        for depth, number in enumerate(request.hash_ids[: request.full_blocks]):
            hashed = sha256(hashed + number.to_bytes(8, "big")).digest()
            tokens = range(number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS)
            descents.append(Descent(tokens, depth, keys[-1] if keys else b"").pack())
            keys.append(hashed + b"\0")
        return cls(keys, descents)


def hash_of(key: bytes) -> int:
    """How events name a block."""
    return int.from_bytes(key[24:32], "big")


@dataclass(slots=True)
class Index:
    """A router's index of one publisher. ``listen`` runs in a thread of its own."""

    publish: str
    replay: str
    blocks: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    cut: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def listen(self) -> None:
        """Hears batches, and asks for those that it missed."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        last = -1
        while not self.ended.is_set():
            with context.socket(zmq.SUB) as heard:
                heard.setsockopt(zmq.SUBSCRIBE, b"kv@")
                heard.connect(self.publish)
                while not self.ended.is_set() and not self.cut.is_set():
                    if heard.poll(50):
                        _, raw, payload = heard.recv_multipart()
                        number = int.from_bytes(raw, "big")
                        if number != last + 1:
                            last = max(last, self._ask(last + 1))
                        if number > last:
                            self._apply(payload)
                            last = number
            while self.cut.is_set() and not self.ended.wait(0.05):
                pass

    def _ask(self, first: int) -> int:
        """Applies what was missed; returns the number of its last batch."""
        last = -1
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        with context.socket(zmq.DEALER) as asked:
            asked.setsockopt(zmq.LINGER, 0)
            asked.connect(self.replay)
            asked.send_multipart((b"", max(0, first).to_bytes(8, "big")))
            while asked.poll(2_000):
                _, raw, payload = asked.recv_multipart()
                number = int.from_bytes(raw, "big", signed=True)
                if number == -1:
                    break
                self._apply(payload)
                last = number
        return last

    def _apply(self, payload: bytes) -> None:
        with self.lock:
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == "BlockStored":
                    self.blocks.update(event["block_hashes"])
                elif event["type"] == "BlockRemoved":
                    self.blocks.difference_update(event["block_hashes"])
                else:
                    self.blocks.clear()


class Comparison:
    """The index beside the root's listing, sampled by a thread."""

    def __init__(self, root: Path, cache: Cache, prompts: Sequence[Prompt], index: Index) -> None:
        self._chunks = root / "chunks"
        self._index = index
        self._chains = [
            [(block_address(cache.namespace, key).hex(), hash_of(key)) for key in each.keys] for each in prompts
        ]
        self._wrong: tuple[dict[int, float], dict[int, float]] = ({}, {})
        """Since when each entry is too many, or too few."""
        self._back_s = 0.0
        self.is_same = False
        self.worst = [0, 0.0, 0, 0.0]
        """The most entries too many and too few, and the longest time of one of each."""

    def sample(self, ended: threading.Event) -> None:
        """Compares until ``ended``."""
        while not ended.wait(SAMPLE_S):
            before = self._readable()
            with self._index.lock:
                found = set(self._index.blocks)
            after, now_s = self._readable(), time.monotonic()
            # What came or went between both listings is no entry to judge.
            for at, wrong in enumerate((found - before - after, (before & after) - found)):
                since = {each: self._wrong[at].get(each, now_s) for each in wrong}
                self._wrong[at].clear()
                self._wrong[at].update(since)
                self.worst[2 * at] = max(self.worst[2 * at], len(since))
                first_s = self._back_s if at else 0.0
                oldest_s = max((now_s - max(each, first_s) for each in since.values()), default=0.0)
                self.worst[2 * at + 1] = max(self.worst[2 * at + 1], oldest_s)
            self.is_same = found == before == after

    def returned(self) -> None:
        """Counts entries too few from now on: what was killed is back."""
        self._back_s, self.worst[2:] = time.monotonic(), [0, 0.0]

    def _readable(self) -> set[int]:
        """Blocks whose files are there, with those of all blocks before them."""
        there = set[str]()
        with suppress(FileNotFoundError):
            for shard in os.scandir(self._chunks):
                there.update(entry.name.partition(".")[0] for entry in os.scandir(shard.path))
        found = set[int]()
        for chain in self._chains:
            for address, hashed in chain:
                if address not in there:
                    break
                found.add(hashed)
        return found


class Storing:
    """Stores prompts at a rate, over and over, until told to pause."""

    def __init__(self, cache: Cache, prompts: Sequence[Prompt], rate: float) -> None:
        self._cache = cache
        self._prompts = prompts
        self._rate = rate
        self.goes = threading.Event()
        self.failed = 0

    def run(self, ended: threading.Event) -> None:
        """Stores until ``ended``."""
        turn = 0
        while not ended.wait(1 / self._rate):
            if not self.goes.is_set():
                continue
            prompt = self._prompts[turn % len(self._prompts)]
            turn += 1
            try:
                self._cache.blocks.put(prompt.keys, [bytes(BLOCK_BYTES)] * len(prompt.keys), descents=prompt.descents)
            except KVStoreError:
                self.failed += 1


class Child:
    """A program that can be killed and started again, with the same words."""

    def __init__(self, *words: str, ready: bool = True) -> None:
        self._words = words
        self._ready = ready
        self.said: dict[str, str] = {}
        self.start()

    def start(self) -> None:
        """Starts it, and waits until it is ready if it says so."""
        self._process = subprocess.Popen([sys.executable, "-m", *self._words], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if self._ready:
            self.said = dict(pair.split("=", 1) for pair in self._process.stdout.readline().split()[1:])

    def end(self, how: int = signal.SIGTERM) -> None:
        """Ends it. Idempotent."""
        self._process.send_signal(how)
        self._process.wait(30)

    def killed(self) -> None:
        """Kills it, and starts it again a second later."""
        self.end(signal.SIGKILL)
        time.sleep(1.0)
        self.start()


@contextmanager
def thread(work: Callable[[], object]) -> Iterator[None]:
    """Runs ``work``, which ends by itself, beside the block."""
    running = threading.Thread(target=work, daemon=True)
    running.start()
    yield
    running.join(10.0)


@dataclass(slots=True)
class Stage:
    """Everything that an act may use."""

    root: Path
    cache: Cache
    prompts: list[Prompt]
    publisher: Child
    worker: Child
    collector: Child
    index: Index

    def cut(self) -> None:
        """Cuts the subscriber off for two seconds."""
        self.index.cut.set()
        time.sleep(2.0)
        self.index.cut.clear()

    def damage(self) -> None:
        """Overwrites the file of a prompt's first block, and reads it."""
        for prompt in self.prompts:
            address = block_address(self.cache.namespace, prompt.keys[0]).hex() if prompt.keys else "-"
            for path in (self.root / "chunks").glob(f"*/{address}.*"):
                path.write_bytes(bytes(path.stat().st_size))
                self.cache.blocks.get(prompt.keys[:1], [bytearray(BLOCK_BYTES)])
                return


def play(stage: Stage, storing: Storing, comparison: Comparison) -> None:
    """Plays the acts, and prints a line for each."""
    acts: list[tuple[str, Callable[[], object]]] = [
        ("prompts stored, a quarter kept", lambda: None),
        ("kill -9 of the publisher", stage.publisher.killed),
        ("kill -9 of the node", stage.worker.killed),
        ("kill -9 of the collector", stage.collector.killed),
        ("a subscriber cut off", stage.cut),
        ("a damaged file", stage.damage),
        ("a clear", stage.cache.clear),
    ]
    print(f"{'act':34} {'too many':>9} {'for':>8} {'too few':>9} {'for':>8} {'right again':>12}")
    for name, act in acts:
        comparison.worst = [0, 0.0, 0, 0.0]
        storing.goes.set()
        time.sleep(LOAD_S)
        act()
        comparison.returned()
        time.sleep(LOAD_S)
        storing.goes.clear()
        paused_s = time.monotonic()
        while not comparison.is_same and time.monotonic() < paused_s + QUIET_S:
            time.sleep(SAMPLE_S)
        again = f"{time.monotonic() - paused_s:10.1f} s" if comparison.is_same else "not within 20 s"
        many, many_s, few, few_s = comparison.worst
        print(f"{name:34} {many:9} {many_s:6.1f} s {few:9} {few_s:6.1f} s {again}", flush=True)


def promise(trace: Path, requests: int, rate: float) -> None:
    """Prints the table."""
    prompts = [Prompt.of(each) for each in load_trace(trace, requests)]
    distinct = len({key for each in prompts for key in each.keys})
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, ExitStack() as undo:
        etcd = undo.enter_context(EmbeddedEtcd(Path(folder, "etcd")))
        root = Path(folder, "root")
        common = ("--root", str(root), "--etcd", etcd.endpoints)
        worker = Child("kvstore.cli.main", "worker", *common, "--listen", f"127.0.0.1:{_port()}")
        collector = Child(
            *("kvstore_gc", *common, "--interval", "1s", "--max-bytes", str(distinct * FILE_BYTES // 4)), ready=False
        )
        endpoints = ("--publish", f"tcp://127.0.0.1:{_port()}", "--replay", f"tcp://127.0.0.1:{_port()}")
        publisher = Child("kvstore.cli.main", "events", *common, *endpoints)
        for child in (worker, collector, publisher):
            undo.callback(child.end)
        store = undo.enter_context(kvstore.connect(worker.said["grpc"]))
        cache = store.namespace("m", LAYOUT)
        index, ended = Index(publisher.said["publish"], publisher.said["replay"]), threading.Event()
        comparison, storing = Comparison(root, cache, prompts, index), Storing(cache, prompts, rate)
        for work in (index.listen, lambda: comparison.sample(ended), lambda: storing.run(ended)):
            undo.enter_context(thread(work))
        undo.callback(ended.set)
        undo.callback(index.ended.set)
        print(json.dumps({"requests": requests, "distinct blocks": distinct, "kept": distinct // 4}))
        play(Stage(root, cache, prompts, publisher, worker, collector, index), storing, comparison)
        print(f"puts that failed: {storing.failed}")


def _port() -> int:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.PUB) as found:
        port: int = found.bind_to_random_port("tcp://127.0.0.1")
    return port


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=4.0)
    asked: Any = parser.parse_args()
    promise(asked.trace, asked.requests, asked.rate)


if __name__ == "__main__":
    main()
