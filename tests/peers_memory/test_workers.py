"""Three workers, a real etcd and one root: chunks put at one are read from its memory at the others, whatever fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.meta.embedded_etcd import EmbeddedEtcd
from tests.kit.etcd import eventually, frozen, running_etcd
from tests.kit.patience import PATIENCE_S
from tests.peers_memory.acting import LAYOUT, META_S

pytestmark = pytest.mark.slow

INTERVAL_S = 0.2
CHUNKS = 20


class Actor:
    """One worker's process."""

    def __init__(self, root: Path, etcd: str) -> None:
        command = [sys.executable, "-m", "tests.peers_memory.acting", str(root), etcd, str(INTERVAL_S)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._line()

    def do(self, word: str, *rest: object) -> int:
        """Sends a command; raises if the process ends instead of answering."""
        assert self.process.stdin is not None
        print(word, *rest, file=self.process.stdin, flush=True)
        return int(self._line())

    def timed(self, word: str, *rest: object) -> tuple[int, float]:
        began_s = time.monotonic()
        return self.do(word, *rest), time.monotonic() - began_s

    def knows(self, seed: int) -> None:
        """Waits until its peers are reported to have a prompt."""
        eventually(lambda: self.do("known", seed, CHUNKS) == CHUNKS)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the worker ended: {self.process.poll()}"
        return line.strip()


class Cluster:
    """An etcd and three workers."""

    def __init__(self, root: Path, etcd: EmbeddedEtcd) -> None:
        self.root = root
        self.etcd = etcd
        self.actors = [Actor(root, etcd.endpoints) for _ in range(3)]

    def wipe(self) -> None:
        """Deletes all chunks from the root, so that reads can only come from memory."""
        for file in (self.root / "chunks").glob("*/*"):
            file.unlink()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    root = Path("/dev/shm" if os.path.isdir("/dev/shm") else tmp_path, f"kvstore-peers-{os.getpid()}")
    root.mkdir()
    try:
        with running_etcd(tmp_path / "etcd") as etcd:
            made = Cluster(root, etcd)
            try:
                yield made
            finally:
                for actor in made.actors:
                    actor.close()
    finally:
        shutil.rmtree(root)


@contextmanager
def stopped(actor: Actor) -> Iterator[None]:
    with frozen(actor.process.pid):
        yield


def test_a_put_is_known_to_others_and_read_from_memory(cluster: Cluster) -> None:
    """R1, P4: and who read it serves it too, when the first is dead."""
    a, b, c = cluster.actors
    assert a.do("put", 1, CHUNKS) == CHUNKS
    b.knows(1)
    c.knows(1)
    cluster.wipe()
    assert b.do("match", 1, CHUNKS) == CHUNKS
    assert b.do("get", 1, CHUNKS) == CHUNKS
    assert b.do("stat", "peers_hits") == CHUNKS
    assert b.do("stat", "memory_bytes") == CHUNKS * LAYOUT.chunk_bytes and b.do("stat", "bytes_read") == 0
    assert a.do("stat", "memory_bytes") == a.do("stat", "memory_hits") == 0, "the peer counts what its caller got"
    a.kill()
    eventually(lambda: c.do("get", 1, CHUNKS) == CHUNKS)


def test_a_killed_peer_costs_misses_and_no_wait(cluster: Cluster) -> None:
    a, b, _ = cluster.actors
    a.do("put", 1, CHUNKS)
    a.do("put", 2, CHUNKS)
    b.knows(1)
    assert b.do("get", 2, CHUNKS) == CHUNKS, "a connection is there"
    a.kill()
    assert b.do("get", 1, CHUNKS) == CHUNKS, "the root has them still"
    assert b.do("stat", "peers_aside") == 1
    cluster.wipe()
    a_again = Actor(cluster.root, cluster.etcd.endpoints)
    cluster.actors[0] = a_again
    assert a_again.do("put", 3, CHUNKS) == CHUNKS
    b.knows(3)
    cluster.wipe()
    assert b.do("get", 3, CHUNKS) == CHUNKS


def test_a_frozen_peer_costs_one_bounded_wait(cluster: Cluster) -> None:
    """A partition does the same. Nothing raises, no byte is wrong, and the next get does not wait for it again."""
    a, b, _ = cluster.actors
    for seed in (1, 2, 3):
        a.do("put", seed, CHUNKS)
    for seed in (1, 2, 3):
        b.knows(seed)
    assert b.do("get", 3, CHUNKS) == CHUNKS
    with stopped(a):
        assert b.do("get", 1, CHUNKS) == CHUNKS, "from the root"
        assert (failed := b.do("stat", "peers_failed")) > 0
        assert b.do("get", 2, CHUNKS) == CHUNKS
        assert b.do("stat", "peers_failed") == failed, "it is not asked again"
    eventually(lambda: b.do("stat", "peers_aside") == 0)


def test_a_clear_reaches_the_memory_of_others(cluster: Cluster) -> None:
    a, b, _ = cluster.actors
    a.do("put", 1, CHUNKS)
    b.knows(1)
    assert b.do("get", 1, CHUNKS) == CHUNKS
    assert b.do("stat", "memory_chunks") == CHUNKS
    a.do("clear")
    eventually(lambda: b.do("stat", "memory_chunks") == 0)
    eventually(lambda: b.do("known", 1, CHUNKS) == 0)


def test_etcd_away_for_longer_than_a_session(cluster: Cluster) -> None:
    """P1: published digests go with the lease, at both ends; the node goes on alone; then all is published again."""
    a, b, _ = cluster.actors
    a.do("put", 1, CHUNKS)
    b.knows(1)
    with frozen(cluster.etcd.pid):
        eventually(lambda: b.do("stat", "session_alive") == 0)
        eventually(lambda: b.do("known", 1, CHUNKS) == 0)
        found, took_s = b.timed("get", 1, CHUNKS)
        assert (found, took_s < META_S / 2) == (CHUNKS, True), "from the root"
        assert a.do("put", 2, CHUNKS) == CHUNKS
    b.knows(2)
    b.knows(1)
