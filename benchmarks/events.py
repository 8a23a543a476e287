"""KV events: what a publisher costs under load, what it keeps for each chunk, and how long a question takes.

Hypothesis: with 2,000 blocks stored and 2,000 removed a second and 10 subscribers the publisher takes at most a fifth
of a core; a known chunk costs about a kilobyte; a question about 10,000 blocks takes 5 ms of CPU
(p99) with a million chunks known.

    python -m benchmarks events load [--seconds 20] [--rate 2000]
    python -m benchmarks events known [--chunks 1000000]
    python -m benchmarks events questions [--prompts 1000]

The baseline of a question is ``RecentChains.of`` alone, which hashes the prompt's 160,000 tokens: no answer can do
without it. No prompt is asked for twice within what that remembers.

``questions`` asks a worker with memory and a publisher over HTTP: random prompts, whose answers are compared with
``match``, and prompts of 10,000 blocks, whose time from request to answer is measured at the client.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import zmq

import kvstore
from kvstore.core.address import Address
from kvstore.core.layout import Layout
from kvstore.core.namespace import Namespace
from kvstore.events.inventory import EventBlock, NamespaceIndex
from kvstore.events.query import RECENT_BYTES, Answers, Question
from kvstore.format import places
from kvstore.format.keyset import ChunkKeys, RecentChains
from kvstore.meta.embedded_etcd import EmbeddedEtcd
from kvstore.meta.etcd import EtcdMetadata
from kvstore.meta.keys import Keys, SweepId
from kvstore.meta.store import Delete, Put
from kvstore.meta.sweeps import Condemned
from kvstore.root.identity import read_identity
from kvstore.root.posix import PosixRoot

LAYOUT = Layout(layers=1, kv_heads=1, head_dim=8, dtype="int8", chunk_tokens=16)
SPACE = Namespace.of("m", LAYOUT)
CHAIN = 100
SUBSCRIBERS = 10
KEPT_S = 5
"""Chains are deleted so long after they were stored."""
KEYS = 64
"""Keys in one transaction."""
BLOCKS = 10_000
ROUNDS = 500


def load(seconds: int, rate: int) -> None:
    """Chains come and go at ``rate`` blocks a second each; prints CPU of the publisher and how late it was."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, EmbeddedEtcd(Path(folder, "etcd")) as etcd:
        root = Path(folder, "root")
        with kvstore.open(root, etcd=etcd.endpoints) as store:
            store.namespace("m", LAYOUT)
        # From here on alone: a node would end its session, because no sweep links the keys below to its chain.
        with kvstore.open(root, max_bytes=None) as store, publisher(root, etcd.endpoints) as (child, said):
            cache = store.namespace("m", LAYOUT)
            heard = _Heard([_subscribed(said["publish"]) for _ in range(SUBSCRIBERS)])
            deleting = _Deleting(root, etcd.endpoints)
            cpu_s, began_s, chains = _cpu_s(child.pid), time.monotonic(), list[ChunkKeys]()
            late_s: list[float] = []
            for turn in range(seconds):
                for at in range(rate // CHAIN):
                    tokens = np.random.default_rng((turn, at)).integers(0, 50_000, CHAIN * 16, np.uint32)
                    cache.put(tokens, np.zeros(LAYOUT.shape(len(tokens)), np.int8))
                    chains.append(ChunkKeys.of(SPACE, tokens))
                if turn >= KEPT_S:
                    gone, chains = chains[: rate // CHAIN], chains[rate // CHAIN :]
                    late_s.append(deleting.take(gone, heard))
                while time.monotonic() < began_s + turn + 1:
                    heard.drain(0.02)
            took_s = time.monotonic() - began_s
            cpu_s = _cpu_s(child.pid) - cpu_s
            there = {int.from_bytes(each[8:], "big") for chain in chains for each in chain.addresses}
            settled_s = time.monotonic()
            while heard.hashes != there and time.monotonic() < settled_s + 60:
                heard.drain(0.05)
            after_s = time.monotonic() - settled_s
            print(f"stored {seconds * rate / took_s:.0f} and removed {len(late_s) * rate / took_s:.0f} blocks/s")
            print(f"publisher: {cpu_s / took_s:.3f} of a core; {heard.batches} batches to {SUBSCRIBERS} subscribers")
            median, worst = np.median(late_s) * 1e3, max(late_s) * 1e3
            print(f"{rate} removals heard after their keys were put: median {median:.0f} ms, worst {worst:.0f} ms")
            print(f"all alike: {heard.alike}; index equal to the root {after_s:.1f} s after the end")


def known(chunks: int) -> None:
    """A million chunks in an inventory: bytes of each, and the time of questions about 10,000 blocks."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    inventory, made = NamespaceIndex(SPACE.digest, 0), []
    chance, blocks = np.random.default_rng(0), dict[Address, EventBlock]()
    for start in range(0, chunks, BLOCKS):
        tokens = chance.integers(0, 50_000, min(BLOCKS, chunks - start) * 16, np.uint32)
        chain, lines = ChunkKeys.of(SPACE, tokens), tokens.reshape(-1, 16)
        for depth, address in enumerate(chain.addresses):
            number = int.from_bytes(address[8:], "big")
            blocks[address] = EventBlock(address, chain.parent(depth), depth, lines[depth].tobytes(), number, None)
        made.append(tokens if start < 50 * BLOCKS else None)
    inventory.listed(0, blocks)
    for entry in inventory.unknown():
        inventory.learn(entry, blocks[entry.address])
    inventory.settle()
    del blocks
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(f"{chunks} chunks: {grown / chunks:.0f} bytes each at the peak, 64 of them tokens")
    model = SimpleNamespace(namespace=SPACE, inventory=inventory)
    truth: Any = SimpleNamespace(models={SPACE.id: model}, lock=threading.Condition())
    answers = Answers(truth, "kvstore", "STORAGE")
    prompts = [each for each in made if each is not None]
    chains = RecentChains(RECENT_BYTES)
    times: dict[str, list[float]] = {"answer": [], "hashing alone": []}
    for turn in range(ROUNDS):
        tokens = prompts[turn % len(prompts)]
        began_s = time.thread_time()
        found = answers.answer(Question("m", "", tokens, None))
        times["answer"].append(time.thread_time() - began_s)
        assert found["blocks"] == BLOCKS
        began_s = time.thread_time()
        chains.of(SPACE, tokens)
        times["hashing alone"].append(time.thread_time() - began_s)
    for name, each in times.items():
        print(f"{name}: CPU median {np.median(each) * 1e3:.2f} ms, p99 {np.quantile(each, 0.99) * 1e3:.2f} ms")


def questions(prompts: int) -> None:
    """Answers of a worker and of a publisher beside ``match``, and how long a question about 10,000 blocks takes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        root, words = Path(folder, "root"), ["--listen", "127.0.0.1:0", "--memory", "1GiB", "--any-account"]
        state = {**os.environ, "XDG_STATE_HOME": folder}
        words += ["--root", str(root), "--events", "tcp://*:0", "--write", "through"]
        with _running(["up", *words], state) as (_, said), kvstore.connect(said["grpc"]) as store:
            cache, chance = store.namespace("m", LAYOUT), np.random.default_rng(1)
            stems = [chance.integers(0, 50, 100 * 16, np.uint32) for _ in range(5)]
            asked = []
            for number in range(prompts):
                stem = stems[number % len(stems)][: int(chance.integers(0, 1_600))]
                asked.append(np.concatenate([stem, chance.integers(0, 50, int(chance.integers(0, 400)), np.uint32)]))
                if number % 3 == 0:
                    cache.put(asked[-1], np.zeros(LAYOUT.shape(len(asked[-1])), np.int8))
            long = [chance.integers(0, 50_000, BLOCKS * 16, np.uint32) for _ in range(10)]
            for tokens in long:
                cache.put(tokens, np.zeros(LAYOUT.shape(len(tokens)), np.int8))
            for name, address in (("worker", said["metrics"]), ("publisher", said["query"])):
                while _asked(address, long[-1])[0]["blocks"] < BLOCKS:
                    time.sleep(0.1)
                wrong = sum(_asked(address, each)[0]["longest_matched"] != cache.match(each) for each in asked)
                print(f"{name}: {wrong} of {prompts} answers differ from match")
                times = [_asked(address, long[turn % len(long)])[1] * 1e3 for turn in range(ROUNDS)]
                median, p99 = np.median(times), np.quantile(times, 0.99)
                print(f"{name}: {BLOCKS} blocks over HTTP: median {median:.2f} ms, p99 {p99:.2f} ms")


def _asked(address: str, tokens: Any) -> tuple[dict[str, Any], float]:
    """An answer, and the seconds from the request to it."""
    headers = {"Content-Type": "application/octet-stream"}
    request = urllib.request.Request(f"http://{address}/query?model=m", tokens.astype("<u4").tobytes(), headers)
    began_s = time.monotonic()
    with urllib.request.urlopen(request, timeout=60) as answer:
        content = answer.read()
    return json.loads(content), time.monotonic() - began_s


class _Heard:
    """Subscribers: all count, the first keeps an index."""

    def __init__(self, sockets: list[zmq.Socket[bytes]]) -> None:
        self.hashes: set[int] = set()
        self.batches = 0
        self._sockets = sockets
        self._last = [b""] * len(sockets)

    @property
    def alike(self) -> bool:
        return len({*self._last}) == 1

    def drain(self, wait_s: float) -> None:
        self._sockets[0].poll(int(wait_s * 1000))
        for at, socket in enumerate(self._sockets):
            while socket.poll(0):
                _, self._last[at], payload = socket.recv_multipart()
                if not at:
                    self._apply(payload)

    def _apply(self, payload: bytes) -> None:
        self.batches += 1
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "BlockStored":
                self.hashes.update(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                self.hashes.difference_update(event["block_hashes"])
            else:
                self.hashes.clear()


class _Deleting:
    """A collector's steps that events see: keys that condemn, deletions, and no keys any more."""

    def __init__(self, root: Path, etcd: str) -> None:
        self._root = PosixRoot(str(root))
        identity = read_identity(self._root)
        assert identity is not None
        self._identity, self._meta, self._keys = identity, EtcdMetadata(etcd), Keys(identity.root)

    def take(self, chains: list[ChunkKeys], heard: _Heard) -> float:
        """Deletes chains; returns the seconds from their condemnation until a subscriber had received all removals."""
        bits = self._identity.shard_bits
        victims: dict[int, list[Address]] = {}
        for each in (address for chain in chains for address in chain.addresses):
            victims.setdefault(places.shard(each, bits), []).append(each)
        operations = [
            Put(
                self._keys.condemned_in(shard),
                Condemned.of_victims(SweepId(bytes(16)), bytes(16), of_shard).to_bytes(),
            )
            for shard, of_shard in victims.items()
        ]
        for start in range(0, len(operations), KEYS):
            self._meta.txn((), operations[start : start + KEYS])
        began_s = time.monotonic()
        gone = {int.from_bytes(each[8:], "big") for chain in chains for each in chain.addresses}
        while heard.hashes & gone and time.monotonic() < began_s + 60:
            heard.drain(0.005)
        late_s = time.monotonic() - began_s
        for chain in chains:
            for each in chain.addresses:
                self._root.remove(places.chunk(each, SPACE.id, bits))
        for start in range(0, len(operations), KEYS):
            self._meta.txn((), [Delete(each.key) for each in operations[start : start + KEYS]])
        return late_s


@contextmanager
def publisher(root: Path, etcd: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    words = ["--root", str(root), "--etcd", etcd, "--publish", "tcp://*:0", "--replay", "tcp://*:0"]
    with _running(["events", *words], None) as found:
        yield found


@contextmanager
def _running(
    words: list[str], environment: dict[str, str] | None
) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A ``kvstore`` program, and the pairs of its ready line."""
    command = [sys.executable, "-m", "kvstore.cli.main", *words]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None
    try:
        yield child, dict(pair.split("=", 1) for pair in child.stdout.readline().split()[1:])
    finally:
        child.terminate()
        child.wait(30)


def _subscribed(endpoint: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(endpoint)
    return socket


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(given: Sequence[str] | None = None) -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks events", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["load", "known", "questions"])
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--rate", type=int, default=2000)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--prompts", type=int, default=1_000)
    asked = parser.parse_args(given)
    if asked.what == "load":
        load(asked.seconds, asked.rate)
    elif asked.what == "known":
        known(asked.chunks)
    else:
        questions(asked.prompts)
    return 0
