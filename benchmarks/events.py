"""KV events: what a publisher costs under load, what it keeps for each chunk, and how long a question takes.

Hypothesis: with 2,000 blocks stored and 2,000 removed a second and 10 subscribers the publisher takes at most a fifth
of a core; a known chunk costs less than 100 bytes beside its tokens; a question about 10,000 blocks takes 5 ms of CPU
(p99) with a million chunks known.

    python -m benchmarks.events load [--seconds 20] [--rate 2000]
    python -m benchmarks.events known [--chunks 1000000]

The baseline of a question is ``RecentChains.of`` alone, which hashes the prompt's 160,000 tokens: no answer can do
without it. No prompt is asked for twice within what that remembers.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import zmq

import kvstore
from kvstore.address import Address, Chain
from kvstore.events.inventory import Identities, Inventory
from kvstore.events.query import RECENT_BYTES, Answers
from kvstore.format import places
from kvstore.layout import Layout
from kvstore.meta.etcd import EtcdMeta
from kvstore.meta.interface import Delete, Put
from kvstore.meta.keys import Keys, SweepId
from kvstore.meta.server import EmbeddedEtcd
from kvstore.meta.sweeps import Condemned
from kvstore.namespace import Namespace
from kvstore.node.chains import RecentChains
from kvstore.root.identity import read_identity
from kvstore.root.posix import PosixRoot
from kvstore.waiting import Monitor
from kvstore.wire.questions import Question

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
        # From here on alone: a node would end its session, because nobody links the keys below to its chain of sweeps.
        with kvstore.open(root, max_bytes=None) as store, publisher(root, etcd.endpoints) as (child, said):
            cache = store.namespace("m", LAYOUT)
            heard = _Heard([_subscribed(said["publish"]) for _ in range(SUBSCRIBERS)])
            deleting = _Deleting(root, etcd.endpoints)
            cpu_s, began_s, chains = _cpu_s(child.pid), time.monotonic(), list[Chain]()
            late_s: list[float] = []
            for turn in range(seconds):
                for at in range(rate // CHAIN):
                    tokens = np.random.default_rng((turn, at)).integers(0, 50_000, CHAIN * 16, np.uint32)
                    cache.put(tokens, np.zeros(LAYOUT.shape(len(tokens)), np.int8))
                    chains.append(Chain.of(SPACE, tokens))
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
    inventory, made = Inventory(16), []
    chance = np.random.default_rng(0)
    for start in range(0, chunks, BLOCKS):
        tokens = chance.integers(0, 50_000, min(BLOCKS, chunks - start) * 16, np.uint32)
        chain = Chain.of(SPACE, tokens)
        numbers = np.frombuffer(b"".join(chain.addresses), ">u8").astype(np.uint64).reshape(-1, 2)
        above = np.concatenate([np.zeros((1, 2), np.uint64), numbers[:-1]])
        depths = np.arange(len(numbers), dtype=np.uint32)
        columns = numbers[:, 0], numbers[:, 1], above[:, 0], above[:, 1], depths, tokens.reshape(-1, 16)
        inventory.arrived(numbers[:, 0], numbers[:, 1])
        inventory.learn(Identities(*columns))
        inventory.unknown()
        made.append(tokens if start < 50 * BLOCKS else None)
        inventory.settle()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(f"{inventory.told_count} chunks: {grown / chunks:.0f} bytes each at the peak, 64 of them tokens in a file")
    model = SimpleNamespace(namespace=SPACE, inventory=inventory)
    truth: Any = SimpleNamespace(models={1: model}, lock=Monitor())
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
        self._identity, self._meta, self._keys = identity, EtcdMeta(etcd), Keys(identity.root)

    def take(self, chains: list[Chain], heard: _Heard) -> float:
        """Deletes chains; returns the seconds from their condemnation until a subscriber had heard of all of it."""
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
    command = [sys.executable, "-m", "kvstore.cli.main", "events", "--root", str(root), "--etcd", etcd]
    command += ["--publish", "tcp://*:0", "--replay", "tcp://*:0"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
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


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["load", "known"])
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--rate", type=int, default=2000)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    asked = parser.parse_args()
    if asked.what == "load":
        load(asked.seconds, asked.rate)
    else:
        known(asked.chunks)


if __name__ == "__main__":
    main()
