"""Opens a store in this process, and the port to its node: the engine reads the root itself, without a copy."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - ends after what is registered below, because it is imported before
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from os import PathLike, fspath
from types import TracebackType
from typing import Any
from weakref import WeakSet

import numpy.typing as npt

from kvstore.census.selection import Selection
from kvstore.client.cache import close_when_dropped
from kvstore.client.operation import Operation
from kvstore.client.store import Store
from kvstore.codec.codec import KeyFile
from kvstore.core.address import TokenArray
from kvstore.core.buffers import BufferMap, Pieces, Planes
from kvstore.core.executor import Deadline, Owner
from kvstore.core.metrics import NodeCount
from kvstore.core.namespace import Namespace
from kvstore.core.recency import Hints
from kvstore.core.results import Cleared, LayerMemory, PinRecord, PutResult, StoredBlocks
from kvstore.core.validate import TierName, brief, checked_flag, kind_of, shown
from kvstore.core.write_mode import Durability, DurabilityName, WriteMode, WriteModeName
from kvstore.engine.coordination import ClusterMember
from kvstore.engine.engine import Engine, match_each
from kvstore.engine.gc_state import ChunkHold
from kvstore.engine.open import open_member
from kvstore.engine.settings import AskedBound, Limits, TierSettings
from kvstore.errors import HoldBroken, InvalidRequest, KVStoreError, StoreClosed
from kvstore.format.header import Ancestry
from kvstore.meta.etcd import EtcdTls, EtcdUser
from kvstore.root.identity import SHARD_BITS_DEFAULT
from kvstore.tiers.stack import WriteBehind

# What stores of this process put behind is written to the root before the interpreter ends.


_open: WeakSet[WriteBehind] = WeakSet()
"""The queues of chunks put behind, one of each open store of this process."""
_process = 0
FLUSH_S = 10.0
_waited_s = 0.0
"""How long the end of the main thread has waited for the queues."""


def flush_at_exit(behind: WriteBehind) -> None:
    """Writes what waits there before the interpreter ends, also where a store was dropped just then.

    So it is lost only where a process is killed, not where a script ends without ``close()``.
    """
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        _open.clear()
        # A child that multiprocessing forked ends without calling what atexit has.
        if (multiprocessing := sys.modules.get("multiprocessing.util")) is not None:
            multiprocessing.Finalize(None, _flush_all, exitpriority=0)
    _open.add(behind)


def _flush_all() -> None:
    if _process != os.getpid():
        return
    began_s = time.monotonic() - _waited_s
    for behind in list(_open):
        # All of them write concurrently, so together they have the time of one.
        behind.close(time.monotonic() - began_s)


def _flush_early() -> None:
    """Writes what waits while the libraries of object stores can still connect: they need threads for that."""
    global _waited_s
    began_s = time.monotonic()
    for behind in list(_open) if _process == os.getpid() else ():
        behind.flush(max(0.0, began_s + FLUSH_S - time.monotonic()))  # no close: other threads may still put
    _waited_s = time.monotonic() - began_s


with suppress(AttributeError, RuntimeError):  # no public name; what is registered last is called first
    threading._register_atexit(_flush_early)  # type: ignore[attr-defined]
atexit.register(_flush_all)  # now, since what is registered while the interpreter ends is not called


class OpenMember:
    """The member of a store in this process, as a context around each call. Raises StoreClosed once it is closed.

    So does a call during which another thread closed the store, whatever came of it: what a node that is being closed
    finds may be a miss for that reason alone.
    """

    def __init__(self, member: ClusterMember) -> None:
        self.member = member
        self._owner = Owner()
        self.closed = False

    def __enter__(self) -> ClusterMember:
        # Before any lock is asked for: one that another thread held at the fork is never given back in the child, and
        # what the child wrote into the shared arena, which it would treat as its own, would change the parent's images.
        self._owner.check()
        if self.closed:
            raise StoreClosed
        return self.member

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.closed and (error is None or isinstance(error, Exception)):
            raise StoreClosed from error

    def close(self) -> None:
        """Closes the member; idempotent."""
        self.closed = True  # first: calls that fail because of what follows can tell why
        self.member.close()


class LocalGuard:
    """A hold of the node in this process."""

    def __init__(self, store: OpenMember, node: Engine, hold: ChunkHold) -> None:
        self._store = store
        self._node = node
        self._hold = hold
        self.chunks = hold.count
        """Leading chunks of one prompt that are held."""

    @property
    def protects(self) -> bool:
        holds_any = any(map(len, self._hold.on or ()))
        return holds_any and not self._store.closed and self._node.holds.find(self._hold.id) is not None

    def release(self) -> None:
        self._node.holds.release(self._hold)


class LocalHold(LocalGuard):
    """Held leading chunks of one prompt."""

    def read(self, sections: BufferMap) -> int:
        with self._store:
            return self._node.read(self._hold, sections)

    def layers(self, memory: Callable[[int], LayerMemory], band: int) -> Iterator[tuple[int, LayerMemory]]:
        with self._store:
            self._node.counters.add(NodeCount.REQUESTS_GET)
            yield from self._node.read_layers(self._hold, memory, band=band)

    def view(self) -> list[npt.NDArray[Any]]:
        with self._store:
            return self._node.view(self._hold)


class LocalBlockHold(LocalGuard):
    """Held engine-hashed blocks."""

    def __init__(
        self, store: OpenMember, node: Engine, namespace: Namespace, hold: ChunkHold, present: list[bool]
    ) -> None:
        super().__init__(store, node, hold)
        self._namespace = namespace
        self.present = present

    def read(self, keys: Sequence[bytes], buffers: Pieces) -> list[bool]:
        with self._store:
            self._node.holds.check(self._hold)
            deadline = Deadline(self._node.clock, self._node.limits.read_deadline_s)
            self._node.counters.add(NodeCount.REQUESTS_GET)
            return self._node.blocks.get(self._namespace, keys, buffers, deadline, held=True)


class LocalTransport:
    """The port to a node in this process, in a cluster or alone."""

    def __init__(self, member: ClusterMember) -> None:
        self._store = OpenMember(member)
        self.shared: dict[Hashable, Any] = {}

    @property
    def place(self) -> str:
        return f"root {shown(self._store.member.node.root.url)}" + self._store.closed * ", closed"

    def open_namespace(self, namespace: Namespace) -> None:
        with self._store as member:
            member.claim_namespace(namespace)

    def namespaces(self) -> list[Namespace]:
        with self._store as member:
            return member.node.namespaces()

    def match(self, namespace: Namespace, tokens: TokenArray, *, counts: bool = True) -> int:
        with self._store as member:
            return member.node.match(member.node.chains.of(namespace, tokens), counts=counts)

    def match_each(self, namespace: Namespace, prompts: Sequence[TokenArray]) -> list[int]:
        with self._store as member:
            return match_each(member.node, namespace, prompts, member.node.limits.match_deadline_s)

    def put(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        first: int,
        sections: Planes,
        hints: Hints,
        write: WriteMode | None = None,
    ) -> PutResult:
        with self._store as member:
            return member.node.put(member.node.chains.of(namespace, tokens), first, sections, hints=hints, write=write)

    def get(self, namespace: Namespace, tokens: TokenArray, chunks_max: int, memory: Callable[[int], BufferMap]) -> int:
        with self._store as member:
            size = namespace.layout.chunk_tokens
            hold = member.node.hold(member.node.chains.of(namespace, tokens[: chunks_max * size]))
            try:
                return member.node.read(hold, memory(hold.count))
            except HoldBroken:
                return 0  # the session was lost since the match: a miss, as everything that a read cannot have
            finally:
                member.node.holds.release(hold)

    def hold(self, namespace: Namespace, tokens: TokenArray, ttl_s: float | None, *, counts: bool = True) -> LocalHold:
        with self._store as member:
            hold = member.node.hold(member.node.chains.of(namespace, tokens), ttl_s, counts=counts)
            return LocalHold(self._store, member.node, hold)

    def pin(self, namespace: Namespace, prompt: TokenArray | list[bytes], ttl_s: float, owner: str) -> PinRecord:
        with self._store as member:
            if isinstance(prompt, list):
                return member.pin_blocks(namespace, prompt, ttl_s, owner)
            return member.pin(member.node.chains.of(namespace, prompt), ttl_s, owner)

    def unpin(self, pin_id: str) -> bool:
        with self._store as member:
            return member.unpin(pin_id)

    def pins(self) -> list[PinRecord]:
        with self._store as member:
            return member.pins()

    def refcount(self, namespace: Namespace, tokens: TokenArray) -> int:
        with self._store as member:
            return member.refcount(member.node.chains.of(namespace, tokens))

    def put_blocks(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Pieces,
        hints: Hints,
        write: WriteMode | None = None,
        ancestry: Ancestry | None = None,
    ) -> StoredBlocks:
        with self._store as member:
            written = member.node.put_blocks(namespace, keys, buffers, hints=hints, write=write, ancestry=ancestry)
            return written.of_blocks()

    def match_blocks(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        with self._store as member:
            return member.node.blocks.match(namespace, keys, _match_deadline(member.node))

    def present_blocks(self, namespace: Namespace, keys: Sequence[bytes]) -> list[bool]:
        with self._store as member:
            return member.node.blocks.present(namespace, keys, _match_deadline(member.node))

    def hold_blocks(self, namespace: Namespace, keys: Sequence[bytes], ttl_s: float | None) -> LocalBlockHold:
        with self._store as member:
            hold, present = member.node.blocks.hold(namespace, keys, ttl_s, _match_deadline(member.node))
            return LocalBlockHold(self._store, member.node, namespace, hold, present)

    def get_blocks(self, namespace: Namespace, keys: Sequence[bytes], buffers: Pieces) -> list[bool]:
        with self._store as member:
            deadline = Deadline(member.node.clock, member.node.limits.read_deadline_s)
            member.node.counters.add(NodeCount.REQUESTS_GET)
            return member.node.blocks.get(namespace, keys, buffers, deadline)

    def prefetch(self, namespace: Namespace, tokens: TokenArray, tier: TierName, worker: str | None) -> Operation:
        with self._store as member:
            _check_no_worker(worker)
            return Operation(member.node.begin_prefetch(member.node.chains.of(namespace, tokens), tier))

    def evict_first(self, namespace: Namespace, tokens: TokenArray) -> None:
        with self._store as member:
            member.node.evict_first(member.node.chains.of(namespace, tokens))

    def operations(self) -> list[Operation]:
        with self._store as member:
            return [Operation(run) for run in member.node.operations.every()]

    def clear(self, namespace: Namespace) -> Cleared:
        with self._store as member:
            return member.clear(namespace)

    def clear_selected(self, selection: Selection, *, dry_run: bool, pinned: bool, worker: str | None) -> Operation:
        with self._store as member:
            _check_no_worker(worker)
            return Operation(member.begin_clear(selection, dry_run=dry_run, pinned=pinned))

    def stats(self) -> dict[str, int | float]:
        with self._store as member:
            return member.stats()

    def stats_each(self) -> dict[str, dict[str, int | float] | KVStoreError]:
        return {"": self.stats()}

    def close(self) -> None:
        self._store.close()


def _match_deadline(node: Engine) -> Deadline:
    return Deadline(node.clock, node.limits.match_deadline_s)


def _check_no_worker(worker: str | None) -> None:
    if worker is not None:
        raise InvalidRequest(f"worker={brief(worker)}: this store is in this process and has no workers; leave it out")


def open(
    root: str | PathLike[str],
    etcd: str | Sequence[str] | None = None,
    *,
    durability: Durability | DurabilityName = "none",
    limits: Limits | None = None,
    etcd_tls: EtcdTls | None = None,
    etcd_user: EtcdUser | None = None,
    root_options: Mapping[str, Any] | None = None,
    create: bool = True,
    shard_bits: int = SHARD_BITS_DEFAULT,
    memory: int | str = 0,
    disk: tuple[str, int | str] | None = None,
    write: WriteMode | WriteModeName = "behind",
    keys: str | PathLike[str] | None = None,
    compress: bool = False,
    max_bytes: int | str | None = "auto",
    ttl: float | None = None,
) -> Store:
    """Opens the root at ``root`` (a path or URL) in this process.

    With ``etcd`` (``host:port``, several with commas or as a list) this process is a node of the cluster. Without it,
    processes that open one folder of a local disk share holds and pins, and soon after a first put one of them runs
    ``kvstore-gc`` as a child: files take at most ``max_bytes`` (by default half of what was free when the root was new,
    as its file ``bound`` says; None: no bound), and chunks unused for ``ttl`` seconds go. The smallest limits of all
    that have put something count. Elsewhere both raise InvalidRequest. A host crash may lose (misses) the last half
    minute; about the last second with ``durability="everysec"``, nothing with ``"fsync"``. ``create=False`` makes no
    root; a new one gets ``2 ** shard_bits`` folders (0 to 16; the default suits ten million chunks, take more for
    more). ``root_options`` go to fsspec; ``etcd_tls`` and ``etcd_user`` say how to reach a protected etcd.

    Sizes are bytes, or text such as ``"256MiB"``. ``memory`` is the size (16 MiB or more) of a memory tier for hot
    chunks: a ``get`` of those is a copy, a ``view`` none. ``disk`` is a folder of this process alone and its size:
    chunks that memory evicts go there if they were used more than once. With memory, ``write="behind"`` returns once
    memory has the chunks and writes them to the root soon after (a killed process loses those not yet written);
    ``"through"`` waits for the root and keeps a copy in memory. ``durability="everysec"`` and ``"fsync"`` always wait.
    See kvstore/tiers/MEMORY.md.

    ``keys`` is a file with the keys of tenants whose chunks are encrypted on the root and the local disk
    (kvstore/codec/ENCODINGS.md); it is reloaded when it changes. ``compress`` compresses new chunks on the root.

    Raises RootMismatch (no such root, wrong mount, unknown version), PermissionDenied, Unavailable, InvalidRequest.
    """
    if keys is not None and not isinstance(keys, str | PathLike):
        raise InvalidRequest(f"keys are {kind_of(keys)}: expected the path of a key file")
    if limits is not None and not isinstance(limits, Limits):
        raise InvalidRequest(f"limits are {kind_of(limits)}: expected kvstore.engine.settings.Limits")
    member = open_member(
        fspath(root) if isinstance(root, PathLike) else root,
        etcd,
        durability=Durability.of(durability),
        limits=limits,
        etcd_tls=etcd_tls,
        etcd_user=etcd_user,
        root_options=root_options,
        create=checked_flag("create", create),
        shard_bits=shard_bits,
        settings=TierSettings.of(memory, disk, write),
        keys=None if keys is None else KeyFile(keys).load(),
        compress=checked_flag("compress", compress),
        asked=AskedBound.of(max_bytes, ttl),
    )
    port, tiers = LocalTransport(member), member.node.tiers
    if tiers is not None:
        flush_at_exit(tiers.behind)
    return Store(port, close_when_dropped(port, member.close, str(root)))
