"""The cost of knowing what peers hold: `python -m benchmarks.digests`. Staleness, etcd's load, look-ups, reads.

Hypotheses: another node knows of a chunk after half a sync interval at the median, and after one and a little at the
99th percentile; etcd sees one transaction an interval whatever changes; a look-up takes microseconds.  Baseline: the
Vineyard page's 6.7 s until another node sees an update, with queries that failed for 0.8 to 2.4 s a cycle.

A real etcd on this machine; two nodes in this process, without their bytes: only what they tell each other.  Reads are
from the memory of a real worker on this host, over TCP, beside bare sockets that move as many bytes.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt

import kvstore
from benchmarks.paths import served
from benchmarks.rounds import GIB, percentile
from kvstore import Layout
from kvstore.address import Address, Chain
from kvstore.client.bulk.links import Bulk
from kvstore.client.endpoints import Endpoint
from kvstore.client.limits import ClientLimits
from kvstore.memory.inventory import Prints
from kvstore.meta.embedded_etcd import EmbeddedEtcd
from kvstore.meta.etcd import EtcdMeta
from kvstore.meta.keys import Keys, SessionId
from kvstore.meta.session import Presence
from kvstore.meta.workers import AddressTold, Digests, DigestTold, WorkerRecord
from kvstore.node.counters import Counters
from kvstore.node.wanted import image_bytes
from kvstore.peers.limits import PeerLimits
from kvstore.peers.reports import Publisher, Told, encode
from kvstore.peers.selection import Roster
from kvstore.peers.tier import Follower, ask
from kvstore.sources import SystemClock

HELD = 32_768
"""Chunks in the memory whose digests are written: 64 GiB of 2 MiB each."""
KEYS = Keys(bytes(16))
SENDER = """
import socket, sys
sock, memory = socket.create_connection(("127.0.0.1", int(sys.argv[1]))), bytes(int(sys.argv[2]))
while sock.recv(1):
    sock.sendall(memory)
"""


class Memory:
    """The prints of a memory, as chunks come and go."""

    def __init__(self, held: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._prints = Prints()
        self._addresses = self._fresh(held)
        for address in self._addresses:
            self._prints.add(address)

    def turn_over(self, count: int) -> None:
        """Makes this many changes: as many chunks come as go."""
        with self._lock:
            for address in self._fresh(count // 2):
                at = int(self._random.integers(len(self._addresses)))
                self._prints.remove(self._addresses[at])
                self._prints.add(address)
                self._addresses[at] = address

    def put(self) -> Address:
        """One chunk comes."""
        with self._lock:
            address = self._fresh(1)[0]
            self._prints.add(address)
            self._addresses.append(address)
            return address

    def changes(self) -> set[int]:
        with self._lock:
            return self._prints.changes()

    def prints(self, shard: int) -> npt.NDArray[np.uint32]:
        with self._lock:
            return self._prints.of(shard)

    def _fresh(self, count: int) -> list[Address]:
        raw = self._random.bytes(16 * count)
        return [Address(raw[at : at + 16]) for at in range(0, len(raw), 16)]


class Pair:
    """A node that publishes and one that listens, each with its own etcd client and session."""

    def __init__(self, etcd: str, memory: Memory, limits: PeerLimits) -> None:
        self.counters = Counters()
        self._metas = [EtcdMeta(etcd), EtcdMeta(etcd)]
        self._presences = [Presence(meta, KEYS) for meta in self._metas]
        near, far = (Digests(meta, KEYS) for meta in self._metas)
        self.publisher = Publisher(near, memory, WorkerRecord("a:1"), limits, self.counters, SystemClock(), lambda: 1)
        clock = SystemClock()
        roster = Roster(limits, clock, Random())
        self.follower = Follower(far, "b:1", limits, Counters(), clock, lambda _: None, roster)
        self._presences[0].attach(self.publisher.begin, self.publisher.end)
        self._presences[1].attach(self.follower.begin, self.follower.end)
        for presence in self._presences:
            presence.start(10.0)
        self.publisher.start()
        self.follower.start()

    def close(self) -> None:
        self.publisher.close(5.0)
        self.follower.close(5.0)
        for presence in self._presences:
            presence.close()
        for meta in self._metas:
            meta.close()


@contextmanager
def pair(etcd: str, memory: Memory, limits: PeerLimits) -> Iterator[Pair]:
    made = Pair(etcd, memory, limits)
    try:
        wait_for(lambda: len(made.follower.directory.entries) == HELD)
        yield made
    finally:
        made.close()


def wait_for(holds: object, patience_s: float = 60.0) -> None:
    assert callable(holds)
    ends_s = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > ends_s:
            raise TimeoutError("what was told did not arrive")
        time.sleep(0.0005)


def staleness(etcd: str, interval_s: float, samples: int) -> list[float]:
    """Returns the seconds until a look-up at the other node knows of a new chunk, at random moments."""
    memory, random = Memory(HELD, 1), np.random.default_rng(2)
    found = []
    with pair(etcd, memory, PeerLimits(sync_interval_s=interval_s)) as both:
        for _ in range(samples):
            time.sleep(float(random.uniform(0, interval_s)))
            chunk = [memory.put()]
            began_s = time.monotonic()
            wait_for(lambda chunk=chunk: both.follower.directory.leading(chunk, 0) == 1)
            found.append(time.monotonic() - began_s)
    return found


def load(etcd: str, changes_per_s: int, seconds: float) -> tuple[float, float]:
    """Returns bytes of digests and transactions a second, at a rate of changes and an interval of 1 s."""
    memory = Memory(HELD, 1)
    with pair(etcd, memory, PeerLimits()) as both:
        time.sleep(2.0)
        before, began_s = both.counters.snapshot(), time.monotonic()
        while time.monotonic() - began_s < seconds:
            memory.turn_over(changes_per_s // 50)
            time.sleep(1 / 50)
        took_s, after = time.monotonic() - began_s, both.counters.snapshot()
    bytes_, syncs = (after[name] - before[name] for name in ("peers_digest_bytes", "peers_syncs"))
    return bytes_ / took_s, syncs / took_s


def lookups(prints: int, peers: int, chunks: int) -> tuple[float, float, float]:
    """Seconds of a hit of all chunks, of a miss of the first, and of taking in one changed shard of one peer."""
    told = Told("own:1", 1 << 23)
    memories = [Memory(prints // peers, seed) for seed in range(peers)]
    for number, memory in enumerate(memories):
        session = SessionId(number.to_bytes(16, "big"))
        told.hear(AddressTold(session, f"peer{number}:1", number))
        for shard in range(64):
            told.hear(DigestTold(session, shard, encode(memory.prints(shard))))
    directory = told.directory()
    assert len(directory.entries) > 0.99 * prints
    held = memories[3]._addresses
    random = np.random.default_rng(99)
    hits, misses, changes = [], [], []
    for turn in range(200):
        # As fresh in the cache as the addresses of a prompt that has just been hashed.
        chosen = [Address(bytes(bytearray(held[at]))) for at in random.integers(0, len(held), chunks)]
        other = [Address(random.bytes(16)) for _ in range(chunks)]
        began_s = time.perf_counter()
        assert directory.leading(chosen, 0) == chunks
        hits.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        assert directory.leading(other, 0) <= 1
        misses.append(time.perf_counter() - began_s)
        if turn < 20:
            value = encode(memories[0].prints(turn))
            began_s = time.perf_counter()
            told.hear(DigestTold(SessionId(bytes(16)), turn, value))
            directory = told.directory()
            changes.append(time.perf_counter() - began_s)
    return statistics.median(hits), statistics.median(misses), statistics.median(changes)


def bare(size_bytes: int, rounds: int) -> float:
    """Returns the median seconds in which a process sends this many bytes over loopback to this one."""
    listener = socket.create_server(("127.0.0.1", 0))
    sender = subprocess.Popen([sys.executable, "-c", SENDER, str(listener.getsockname()[1]), str(size_bytes)])
    near, _ = listener.accept()
    memory, took = memoryview(bytearray(size_bytes)), []
    for _ in range(rounds):
        began_s = time.perf_counter()
        near.send(b"x")
        left = memory
        while len(left):
            left = left[near.recv_into(left) :]
        took.append(time.perf_counter() - began_s)
    near.close()
    listener.close()
    sender.wait()
    return statistics.median(took)


def reads(folder: Path, chunks: int, rounds: int) -> tuple[float, float]:
    """GiB/s of whole images from a worker's memory, all chunks in one request, and of bare sockets."""
    layout = Layout(layers=16, kv_heads=8, head_dim=128, dtype="float16", chunk_tokens=32)
    random = np.random.default_rng(1)
    tokens = random.integers(0, 1 << 31, chunks * layout.chunk_tokens)
    kv = random.integers(0, 1 << 16, layout.shape(len(tokens)), dtype=np.uint16).view(np.float16)
    took = []
    with served(folder, folder / "root", memory_bytes=1 << 30) as worker, kvstore.connect(worker.address) as store:
        cache = store.namespace("digests", layout=layout)
        assert cache.put(tokens, kv).tokens_present == len(tokens)
        chain = Chain.of(cache.namespace, tokens.astype("<u4"))
        memory, size = memoryview(bytearray(chunks * image_bytes(chain, 0))), image_bytes(chain, 0)
        images = [memory[at : at + size] for at in range(0, len(memory), size)]
        endpoint = Endpoint(worker.address, Bulk.TCP, ClientLimits())
        for _ in range(rounds):
            answer = ask(endpoint, chain, 0, images, 5.0, 30.0)
            assert answer.count == chunks, answer.trouble
            took.append(answer.took_s)
        endpoint.close()
    return len(memory) / GIB / statistics.median(took), len(memory) / GIB / bare(len(memory), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=60, help="chunks put for each staleness")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each load")
    parser.add_argument("--folder", help="where the worker's root is, such as /dev/shm")
    options = parser.parse_args()
    for count in (500, 4000, 16_000):
        prints = np.sort(np.random.default_rng(count).integers(0, 1 << 32, count, dtype=np.uint32))
        print(f"a digest of {count} prints: {len(encode(prints)) / count:.2f} bytes each")
    hit_s, miss_s, change_s = lookups(1_000_000, 8, 512)
    print(
        f"1,000,000 prints of 8 peers: 512 chunks that are there {hit_s * 1e6:.0f} us, 512 that are not "
        f"{miss_s * 1e6:.0f} us; one changed shard {change_s * 1e3:.1f} ms in the follower"
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        gib_s, bare_gib_s = reads(Path(folder), 64, 15)
        print(
            f"64 chunks of 2 MiB from a worker's memory over one connection: {gib_s:.1f} GiB/s, bare sockets "
            f"{bare_gib_s:.1f} GiB/s"
        )
    with tempfile.TemporaryDirectory() as folder, EmbeddedEtcd(Path(folder)) as etcd:
        for interval_s in (0.2, 1.0):
            found = staleness(etcd.endpoints, interval_s, options.samples)
            print(
                f"sync_interval {interval_s:g} s, {HELD} chunks: another node knows of a put after "
                f"{percentile(found, 0.5):.2f} s (p50), {percentile(found, 0.99):.2f} s (p99)"
            )
        for changes in (100, 1000):
            bytes_per_s, syncs_per_s = load(etcd.endpoints, changes, options.seconds)
            print(
                f"{changes} changes/s among {HELD} chunks, sync_interval 1 s: {bytes_per_s / 1024:.0f} KiB/s of "
                f"digests, {syncs_per_s:.2f} transactions/s"
            )


if __name__ == "__main__":
    main()
