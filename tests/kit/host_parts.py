"""The parts of a root of one host: mapped files, tables, evictions, chunks that are no more than files with headers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import kvstore
from kvstore.core.address import Address
from kvstore.core.clock import Clock, RandomIds, SystemClock
from kvstore.core.namespace import Namespace
from kvstore.engine.chunk_store import PresenceCache
from kvstore.engine.gc_state import HostGcState
from kvstore.format.keyset import ChunkKeys
from kvstore.host import tables as shared_file
from kvstore.host.eviction import Evicted, Eviction, EvictionVictim
from kvstore.host.pins import HostPins, PinTwins
from kvstore.host.tables import COLLECTOR, HoldTable, HostRoom, Number, Shared
from kvstore.meta.pins import PinQuota
from kvstore.root.posix import PosixRoot
from kvstore_gc.config import Config
from kvstore_gc.host import HostCollector
from tests.kit.host_process import LAYOUT, TOKENS_COUNT, kv, tokens
from tests.kit.hosts import TICK_S

SHARD_BITS = 2
SPACE = Namespace.of("model", LAYOUT)
CHUNKS = TOKENS_COUNT // LAYOUT.chunk_tokens


def address(number: int) -> Address:
    """An address by its number."""
    return Address(number.to_bytes(4, "big") * 4)


@dataclass
class Parts:
    """The parts over one folder, as one process has them."""

    folder: Path
    root: PosixRoot
    shared: Shared
    table: HoldTable
    known: PresenceCache

    @staticmethod
    @contextmanager
    def on(folder: Path) -> Iterator[Parts]:
        """The parts over a new root."""
        kvstore.open(folder, shard_bits=SHARD_BITS, max_bytes=None).close()
        shared_file.make(str(folder), 0)
        (folder / COLLECTOR).touch()
        root, known = PosixRoot(folder), PresenceCache(1 << 12, 3600, SystemClock())
        made = Parts(folder, root, Shared(str(folder)), HoldTable(str(folder)), known)
        try:
            yield made
        finally:
            made.table.close()
            root.close()

    def chain(self, prompt: int) -> ChunkKeys:
        """Puts a prompt of CHUNKS chunks; returns it. A tick passes, so that no later listing counts it as used."""
        with kvstore.open(self.folder, max_bytes=None) as store:
            store.namespace("model", LAYOUT).put(tokens(prompt), kv(prompt))
        time.sleep(TICK_S)
        return ChunkKeys.of(SPACE, np.array(tokens(prompt), np.uint32))

    def victims(self, chain: ChunkKeys) -> list[EvictionVictim]:
        """The chunks of a prompt as victims, children first."""
        found = [EvictionVictim(each, chain.namespace.id, 1) for each in chain.addresses]
        return found[::-1]

    def files(self, chain: ChunkKeys) -> list[int]:
        """Which chunks of a prompt are there."""
        names = {path.name.partition(".")[0] for path in (self.folder / "chunks").glob("*/*")}
        return [at for at, each in enumerate(chain.addresses) if each.hex() in names]

    def eviction(self, since_ns: int = 1 << 62) -> Eviction:
        return Eviction(self.root, SHARD_BITS, self.shared, SystemClock(), since_ns)

    def evict(self, chain: ChunkKeys) -> Evicted:
        return self.eviction().evict(self.victims(chain))

    def view(self) -> HostGcState:
        return HostGcState(str(self.folder), self.shared, self.table, self.known, self.room())

    def room(self, wake: Callable[..., None] = lambda **_: None) -> HostRoom:
        return HostRoom(self.shared, self.table, lambda: None, wake)

    def pins(self, quota: PinQuota = PinQuota(10, 10), clock: Clock = SystemClock()) -> HostPins:  # noqa: B008
        twins = PinTwins(self.root, RandomIds(), clock, lambda call: call())
        return HostPins(twins, RandomIds(), clock, quota)

    def collector(self, config: Config | None = None) -> HostCollector:
        return HostCollector(self.root, SHARD_BITS, self.shared, config or Config())

    def limit(self, max_bytes: int) -> None:
        self.shared[Number.LIMIT] = max_bytes


def child_of(folder: Path, program: str, **environment: str) -> subprocess.Popen[str]:
    """A process that runs a program, in which ``folder`` is the root's, and prints a line when it has begun."""
    lines = f"import sys\nfrom kvstore.host.tables import *\nfolder = {str(folder)!r}\n"
    child = subprocess.Popen(
        [sys.executable, "-c", f"{lines}{program}\nprint('begun', flush=True)\nsys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    assert child.stdout is not None and child.stdout.readline() == "begun\n"
    return child
