"""One cluster's root with one store on it, reached in any way; it can be restarted, damaged, swept and inspected.

A test names the way and uses the public interface; everything that builds or reads internals is here.
"""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

import kvstore
from kvstore import Layout
from kvstore.client import Cache, Store
from kvstore.client.limits import ClientLimits
from kvstore.client.local import LocalTransport
from kvstore.client.pool import Bulk
from kvstore.core.clock import RandomIds, SystemClock
from kvstore.core.namespace import Namespace
from kvstore.engine.coordination import ClusterMember
from kvstore.engine.open import join
from kvstore.engine.settings import NO_TIERS, Limits, TierSettings
from kvstore.format import places
from kvstore.format.keyset import ChunkKeys
from kvstore.format.places import Name
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.meta.store import MetadataStore
from kvstore.root.identity import RootIdentity, create_or_open
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryFiles, MemoryRoot
from kvstore.root.posix import PosixRoot
from kvstore.worker.limits import WorkerLimits
from kvstore.worker.server import Worker
from kvstore_gc.deletion import SweepPlan
from kvstore_gc.execute import SweepReport
from kvstore_gc.site import Site, Timings
from tests.kit.keyed import key_file
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.steps import META, ROOT, Stepped, Steps
from tests.kit.stores import LASTING, ONE_QUANTUM_S, SMALL, member_of
from tests.kit.sweeping import WholeSweeper, plans_of

WAYS = ("embedded", "memory", "disk", "shared", "tcp", "grpc")
"""A node in this process without tiers, with memory, with memory and a local disk; a worker by each transport."""
REMOTE = ("shared", "tcp", "grpc")
TENANT = "acme"
LIMITS = Limits(announce_s=0.01, follow_s=0.01, io_threads=4, width=2, quantum_s=ONE_QUANTUM_S)
TIMINGS = Timings(poll_s_min=0.01, poll_s_max=0.02, announce_lag_max_s=330.0, grace_max_s=400.0)
MEMORY_BYTES = 16 << 20
LEFT = (
    "holds client_holds leases memory_referenced_bytes memory_leased_bytes memory_dirty_bytes "
    "behind_bytes bytes_in_flight root_queue"
).split()
"""Gauges that are 0 when nothing is in progress, held or pinned."""


class Backend:
    """A root, its metadata, and a store that reaches them in one of ``WAYS``. Use it as a context.

    ``folder`` makes it a root on a file system (native code), otherwise it is in memory. ``steps`` are struck in calls
    to the root and to the metadata.
    """

    def __init__(
        self,
        way: str,
        folder: Path | None = None,
        *,
        disk: Path | None = None,
        keys: Path | None = None,
        layout: Layout = SMALL,
        limits: Limits = LIMITS,
        worker_limits: WorkerLimits | None = None,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        assert way in WAYS
        self.way, self.layout = way, layout
        self.steps = Steps()
        self.pin_ids: list[str] = []
        """Pins that a test is about to release."""
        self._folder = folder
        self._files = MemoryFiles()
        self._disk = disk
        self._keys = keys
        self._limits = limits
        self._worker_limits = worker_limits
        self._memory_bytes = memory_bytes
        self._meta = MemoryStore(SystemClock())
        self._ids = RandomIds()
        self.plain_root = self._new_root()
        self.identity = create_or_open(self.plain_root, self._ids, shard_bits=2)
        self._undo = ExitStack()
        self.member: ClusterMember
        self.worker: Worker | None = None
        self.store: Store
        self._open()

    @property
    def has_memory(self) -> bool:
        return self.way not in ("embedded", "tcp", "grpc")

    @property
    def tenant(self) -> str:
        return TENANT if self._keys is not None else ""

    def cache(self, name: str = "m") -> Cache:
        """The namespace of a test, encrypted where the backend has keys."""
        return self.store.namespace(name, self.layout, tenant=self.tenant)

    # Lives of a store

    def _new_root(self) -> Root:
        return PosixRoot(self._folder) if self._folder is not None else MemoryRoot(self._files)

    def _ports(self) -> tuple[Root, RootIdentity, MetadataStore]:
        root = self._new_root()
        stepped = cast(Root, Stepped(root, self.steps, ROOT)) if self._folder is None else root
        return stepped, self.identity, cast(MetadataStore, Stepped(MemoryMetadata(self._meta), self.steps, META))

    def _open(self) -> None:
        tiers = NO_TIERS
        if self.has_memory:
            is_disk = self.way == "disk"
            assert not is_disk or self._disk is not None
            tiers = TierSettings(self._memory_bytes, str(self._disk) if is_disk else "", (64 << 20) * is_disk)
        keys = None if self._keys is None else key_file(self._keys, "a", tenant=TENANT)
        self.member = join(
            *self._ports(),
            replace(LASTING, tiers=tiers, keys=keys),
            limits=self._limits,
            clock=SystemClock(),
            ids=self._ids,
            in_cluster=True,
        )
        self._undo.callback(self.member.close)
        eventually(lambda: self.member.node.gc_view.protects, "the session protects")
        if self.way not in REMOTE:
            self.store = Store(LocalTransport(self.member))
        else:
            self.worker = Worker(self.member, "127.0.0.1:0", self._worker_limits)
            self._undo.callback(self.worker.stop)
            self.worker.start()
            patient = ClientLimits(stats_s=PATIENCE_S)
            self.store = kvstore.connect(self.worker.address, limits=patient, bulk=Bulk.of(self.way))
        self._undo.callback(self.store.close)

    def restart(self) -> None:
        """Ends the store and its node in good order, and starts new ones on the same root and metadata."""
        self.close()
        self._open()

    def close(self) -> None:
        self._undo.close()

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def settle(self) -> None:
        """Waits until what was acknowledged is on the root."""
        self.member.node.drain()

    def forget(self) -> None:
        """Makes the node look at the root for chunks that it remembers as present."""
        self.member.node.forget()

    def lose_session(self) -> None:
        """Ends the holds of the node, as the loss of its session does, in a thread of its own."""
        ending = threading.Thread(target=self.member.node.holds.drop_all)
        ending.start()
        ending.join(PATIENCE_S)
        assert not ending.is_alive()

    # Chunks

    def chain(self, cache: Cache, tokens: npt.NDArray[Any] | Sequence[int]) -> ChunkKeys:
        return ChunkKeys.of(cache.namespace, np.asarray(tokens, np.uint32))

    def names(self, cache: Cache, tokens: npt.NDArray[Any] | Sequence[int]) -> list[Name]:
        """The names of a prompt's chunk files."""
        chain = self.chain(cache, tokens)
        return [places.chunk(each, cache.namespace.id, self.identity.shard_bits) for each in chain.addresses]

    def on_root(self, cache: Cache, tokens: npt.NDArray[Any] | Sequence[int]) -> list[bool]:
        """The chunks of a prompt that are files on the root."""
        return [self.plain_root.stat(name) is not None for name in self.names(cache, tokens)]

    def listing(self) -> set[str]:
        """The names of all files on the root."""
        return set(_walk(self.plain_root, ""))

    # Damage

    def corrupt_root(self, name: Name, at: int = 4096 + 5) -> None:
        """Turns a bit of a chunk's file: another file in its place, so that open ones stay intact."""
        reader = self.plain_root.open(name)
        assert reader is not None
        if self._folder is not None:
            with reader:
                replace_flipped(self._folder / name, at)
            return
        with reader, self._files.lock:
            file = self._files.find(name)
            assert file is not None
            self._files.write(name, type(file)(_flipped(file.content, at), file.mtime_ns))

    def corrupt_memory(
        self, cache: Cache, tokens: npt.NDArray[Any] | Sequence[int], index: int, at: int = 4099
    ) -> bool:
        """Turns a bit of a chunk's image in memory; False if it is not there."""
        memory = self.member.node.memory
        if memory is None:
            return False
        with memory.refer(self.chain(cache, tokens), index, 1) as slots:
            for entry in slots.referred:
                memory.arena.memory[entry.offset + at % entry.size_bytes] ^= 1
            return bool(slots.referred)

    def corrupt_disk(self, cache: Cache, tokens: npt.NDArray[Any] | Sequence[int], index: int, at: int = 4099) -> bool:
        """Turns a bit of a chunk's file on the local disk; False if it is not there."""
        address = self.chain(cache, tokens).addresses[index]
        found = [] if self._disk is None else [*self._disk.rglob(f"{address.hex()}*")]
        for path in found:
            replace_flipped(path, at)
        return bool(found)

    # Eviction

    def evict_memory(self) -> None:
        """Empties memory of all that nothing uses; onto the local disk where there is one."""
        tiers = self.member.node.tiers
        if tiers is None:
            return
        with tiers.memory.victims(self._memory_bytes) as victims:
            if tiers.disk is not None:
                for entry, image in zip(victims.referred, victims.present_images(), strict=True):
                    entry.uses += 1  # only what was used more than once goes to the disk
                    tiers.demote(entry, image)
            tiers.memory.evict(victims.referred)

    def on_disk(self, cache: Cache, tokens: npt.NDArray[Any] | Sequence[int]) -> int:
        """Leading chunks on the local disk."""
        tiers = self.member.node.tiers
        return 0 if tiers is None or tiers.disk is None else tiers.disk.leading(self.chain(cache, tokens), 0)

    def collector(self) -> WholeSweeper:
        return WholeSweeper(Site(*self._ports(), SystemClock(), timings=TIMINGS))

    def sweep(self, namespaces: Sequence[Namespace]) -> SweepReport:
        """Has a collector delete everything in some namespaces that it may delete."""
        plans = self.plans(namespaces)
        return self.collector().sweep(plans)

    def plans(self, namespaces: Sequence[Namespace]) -> list[SweepPlan]:
        ends = tuple(f".{namespace.id.hex()}" for namespace in namespaces)
        names = [Name(name) for name in sorted(self.listing()) if name.startswith("chunks/") and name.endswith(ends)]
        return plans_of(self.plain_root, names)

    # Inspection

    def leftovers(self) -> dict[str, Any]:
        """All that an idle store without holds and pins should not have: gauges, staged files, orders, sweeps."""
        stats = self.store.stats()
        found: dict[str, Any] = {name: stats[name] for name in LEFT if stats.get(name)}
        for name in self.listing():
            if name.startswith(("staging/", "trash/", "plans/", "quarantine/")) and not name.endswith("/"):
                found.setdefault(name.partition("/")[0], []).append(name)
        prefix = f"/kv/{self.identity.root.hex()}"
        for part in ("clears/doing", "gc/condemned", "pins"):
            keys = [kv.key for kv in self._meta.list(f"{prefix}/{part}/").items]
            if keys:
                found[part] = keys
        if pins := self.store.pins():
            found["pins"] = [pin.id for pin in pins]
        return found

    def assert_idle(self, allowed: Collection[str] = ()) -> None:
        """Waits until nothing is left over, apart from the kinds in ``allowed``."""
        gc.collect()
        left: Mapping[str, Any] = {}

        def is_idle() -> bool:
            nonlocal left
            left = {name: value for name, value in self.leftovers().items() if name not in allowed}
            return not left

        try:
            eventually(is_idle, patience_s=IDLE_S)
        except AssertionError:
            raise AssertionError(f"left over in {self.way}: {left}") from None


IDLE_S = min(PATIENCE_S, float(os.environ.get("KVSTORE_TEST_IDLE_S", "20")))
_numbers = itertools.count()


def names_of(store: Store, cache: Cache, tokens: npt.NDArray[Any]) -> list[Name]:
    """The names of a prompt's chunk files on the root of a store in this process."""
    chain = ChunkKeys.of(cache.namespace, tokens.astype(np.uint32))
    shard_bits = member_of(store).node.identity.shard_bits
    return [places.chunk(each, cache.namespace.id, shard_bits) for each in chain.addresses]


def replace_flipped(path: Path, at: int) -> None:
    """Replaces a file by a copy with one bit turned."""
    other = path.with_name(f"{path.name}.{next(_numbers)}")
    other.write_bytes(_flipped(path.read_bytes(), at))
    other.replace(path)


def _flipped(content: bytes, at: int) -> bytes:
    changed = bytearray(content)
    changed[at % len(changed)] ^= 1
    return bytes(changed)


def _walk(root: Root, folder: str) -> Iterator[str]:
    for entry in root.list(Name(folder)):
        name = f"{folder}/{entry.name}" if folder else entry.name
        if entry.stat is None:
            yield from _walk(root, name)
        else:
            yield name


def backend(way: str, tmp: Path, *, posix: bool = False, encrypted: bool = False, **options: Any) -> Backend:
    """A backend whose folders are under ``tmp``; to be closed."""
    number = next(_numbers)
    folder, disk = tmp / f"root{number}", tmp / f"disk{number}"
    if posix:
        folder.mkdir()
    keys = tmp / "keys.json" if encrypted else None
    return Backend(way, folder if posix else None, disk=disk, keys=keys, **options)
