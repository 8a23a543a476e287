"""A node as a member of a cluster: its session, the namespaces it claims, the pins it takes. Or a node alone.

Everything here may touch etcd, nothing here is on the path of a chunk.  Without etcd the same code runs over metadata
in a file, which the processes of one host share, or in memory, where pins live as long as this process.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvstore.census.selection import ClearOrder, Selection
from kvstore.core.address import Address
from kvstore.core.executor import Deadline
from kvstore.core.metrics import NodeCount
from kvstore.core.namespace import Namespace, NamespaceDigest
from kvstore.core.operations import OperationRun, Progress, unwatched
from kvstore.core.results import Cleared, PinRecord
from kvstore.core.write_mode import Durability
from kvstore.engine.clear import ClearsFollower, HostClearing, NamespaceClear, resolved
from kvstore.engine.engine import Engine
from kvstore.engine.gc_state import ChunkHold
from kvstore.engine.host import HostMember
from kvstore.engine.settings import TierSettings
from kvstore.errors import InvalidRequest, KVStoreError, Overloaded, Unavailable
from kvstore.format.keyset import BlockKeys, ChunkKeys, KeySet
from kvstore.host.pins import HostPins, PinTwins
from kvstore.meta.clears import Clears
from kvstore.meta.keys import ID_BYTES, Keys, PinId, parse_id
from kvstore.meta.namespaces import Namespaces
from kvstore.meta.pins import PinQuota, Pins
from kvstore.meta.pins import StoredPin as Ref
from kvstore.meta.session import SessionManager
from kvstore.meta.store import MetadataStore
from kvstore.root.identity import newest_number
from kvstore.root.posix import DiskFull

# One sync per second for everything published since the last one: the durability "everysec".


log = logging.getLogger(__name__)

EVERY_S = 1.0
"""A crash of the host loses what was put in this time and in the time that two syncs take."""
SYNC_CLOSE_S = 5.0
"""The end waits so long for a root that does not answer."""


class Syncing:
    """Syncs the file system of a root while something is published.

    It has a thread of its own, so that a root that hangs delays nothing else.
    """

    def __init__(
        self,
        sync: Callable[[], None],
        written_bytes: Callable[[], int],
        every_s: float = EVERY_S,
        close_s: float = SYNC_CLOSE_S,
    ) -> None:
        """``sync`` is the root's, ``written_bytes`` says how much this node has published."""
        self._sync = sync
        self._written_bytes = written_bytes
        self._every_s = every_s
        self._close_s = close_s
        self._synced_bytes = written_bytes()
        self._is_failing = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-syncing", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # else a program that ends leaves its last second to the kernel

    def close(self) -> None:
        """Syncs what is left, if the root answers in time. Idempotent."""
        atexit.unregister(self.close)
        self._ended.set()
        self._thread.join(self._close_s)

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self._step()
        self._step()

    def _step(self) -> None:
        written_bytes = self._written_bytes()  # before the sync: what comes later is for the next one
        if written_bytes == self._synced_bytes:
            return
        try:
            self._sync()
        except KVStoreError as error:
            if not self._is_failing:
                log.warning("sync.failed a crash of this host may lose more than the last second: %s", error)
            self._is_failing = True
            return
        self._synced_bytes, self._is_failing = written_bytes, False


SESSIONS_SHOWN = 3
CLOSE_S = 0.5


class ClusterMember:
    """One node and its place in the cluster. Thread-safe; every call has a deadline.

    Shared metadata may be lost while this process lives: then pins have twins on the root (rule C5).
    """

    def __init__(
        self,
        node: Engine,
        meta: MetadataStore,
        presence: SessionManager,
        *,
        in_cluster: bool = False,
        host: HostMember | None = None,
        is_beside_cluster: bool = False,
    ) -> None:
        """``host`` is for a root that the processes of this host share without etcd; its metadata are in files."""
        self.node = node
        self.in_cluster = in_cluster
        """True if nodes share the metadata, in etcd; else they are this process's alone."""
        self.is_beside_cluster = is_beside_cluster
        """The root is a cluster's, whose collectors do not see what this process alone holds."""
        self.host = host
        self.meta = meta
        self.keys = Keys(node.identity.root)
        self.presence = presence
        self._namespaces = Namespaces(meta, self.keys)
        twins = PinTwins(node.root, node.ids, node.clock, node.on_root)
        self._twins = twins if in_cluster else None
        quota = PinQuota(node.limits.pins_per_owner_max, node.limits.pins_max)
        self._pins: Pins | HostPins = Pins(
            meta, self.keys, presence.current, node.ids, node.clock, twins=self._twins, quota=quota
        )
        self._host_clearing: HostClearing | None = None
        if host is not None:
            self._pins = HostPins(twins, node.ids, node.clock, quota)
            self._host_clearing = HostClearing(node, host, self._all_pinned)
        self._pid = os.getpid()
        self._listing = threading.Lock()
        self.claimed: dict[NamespaceDigest, Namespace] = {}
        """The namespaces that were used here."""
        self.clears = Clears(meta, self.keys, node.clock)
        self._follower: ClearsFollower | None = None
        self._syncing: Syncing | None = None
        """Syncs the root once a second, where that was asked for."""
        presence.attach(lambda session: None, lambda session: node.counters.add(NodeCount.SESSIONS_LOST))

    def start(self, tiers: TierSettings) -> None:
        """Opens the local disk, begins a session, and in a cluster follows what others clear. Call it once.

        Closes the node and raises if one of them fails: InvalidRequest, PermissionDenied, Unavailable.
        """
        node, limits, is_shared = self.node, self.node.limits, self.in_cluster
        if is_shared:
            self._follower = ClearsFollower(node, self.clears, limits.meta_deadline_s)
            self.presence.attach(self._follower.begin, self._follower.end)
        try:
            if node.tiers is not None and tiers.disk_folder:
                node.tiers.add_disk(tiers.disk_folder, tiers.disk_bytes)
                if not is_shared:
                    node.refill(self._host_clearing.clears.orders() if self._host_clearing is not None else ())
            # Metadata in memory are as slow as a busy host: a session begins in the end.
            wait_s = limits.meta_deadline_s if is_shared else limits.write_deadline_s
            self.presence.start(wait_s=max(wait_s, limits.meta_deadline_s))
        except BaseException:
            node.close(timeout_s=0.5)
            raise
        if node.durability is Durability.EVERYSEC:
            self._syncing = Syncing(node.root.sync, lambda: node.gc_view.usage.written_bytes)

    def claim_namespace(self, namespace: Namespace, meta_deadline_s: float | None = None) -> None:
        """Claims the name for its layout, in etcd and on the root. Raises LayoutMismatch, Unavailable."""
        if namespace.digest in self.claimed:
            return
        # The root first, without claiming: a name that it refuses must not be taken in etcd.
        self.node.check_namespace(namespace)
        try:
            self._namespaces.claim(namespace, meta_deadline_s or self.node.limits.meta_deadline_s)
        except Unavailable as error:
            raise Unavailable(f"namespace {namespace.name!r} is new to this node, which needs etcd: {error}") from error
        try:
            self.node.claim_namespace(namespace)
        except DiskFull as full:
            raise self.node.gc_view.usage.refusal(full) from full.__cause__
        self.claimed[namespace.digest] = namespace

    def find_namespace(self, digest: NamespaceDigest) -> Namespace | None:
        """The namespace with this digest, if any node ever claimed it; kept in ``claimed``."""
        namespace = self.claimed.get(digest) or self.node.find_namespace(digest)
        if namespace:
            self.claimed[digest] = namespace
        return namespace

    def pin(self, chain: ChunkKeys, ttl_s: float, owner: str) -> PinRecord:
        """Pins the leading chunks that are there. Raises Unavailable, SessionLost, Overloaded.

        Rule P1: the hold lives until the ref is acknowledged, and only then is each file looked at, so that no
        sweep can ever delete a chunk that this call returns as pinned. Rule P5: a clear that did not
        see the ref is seen here, or has deleted all it will.
        """
        hold = self.node.hold(chain, counts=False)
        return self._pin(hold, hold.chain, ttl_s, owner)

    def pin_blocks(self, namespace: Namespace, keys: Sequence[bytes], ttl_s: float, owner: str) -> PinRecord:
        """Pins those of the blocks that are there, as ``pin`` does; a block counts as one chunk."""
        deadline = Deadline(self.node.clock, self.node.limits.match_deadline_s)
        hold, there = self.node.blocks.hold(namespace, keys, None, deadline, counts=False)
        present = [key for key, found in zip(keys, there, strict=True) if found]
        return self._pin(hold, BlockKeys.of(namespace, present, ()), ttl_s, owner)

    def _pin(self, hold: ChunkHold, wanted: KeySet, ttl_s: float, owner: str) -> PinRecord:
        node, namespace = self.node, wanted.namespace
        owner = owner or socket.gethostname()
        try:
            if not self.in_cluster and self.host is None and node.on_root(lambda: newest_number(node.root)):
                raise InvalidRequest(
                    f"{node.root.url} belongs to a cluster, which does not see the pins of a process alone: open it "
                    "with etcd=, or connect to a worker"
                )
            if hold.born is None:
                raise Unavailable(
                    "this node protects nothing at the moment (no session, or etcd is not this root's: see its log and "
                    "deploy/RUNBOOK.md), so it cannot pin: try again later"
                )
            if not len(wanted):
                return _no_pin(owner, namespace, node.clock.now_s())
            # What only memory has is not there for collectors and other nodes. On a full root it stays in memory: then
            # there is half of the time that a pin has, or pins would take all calls of a worker.
            node.writer.write_out(wanted, node.limits.meta_deadline_s / 2)
            seconds, tokens = max(1, round(ttl_s)), len(wanted) * namespace.layout.chunk_tokens
            ref = self._pins.pin(
                owner, wanted.addresses, seconds, tokens, namespace.digest, node.limits.meta_deadline_s
            )
            try:
                # Still held: so the session that put the ref is the one that collectors have waited for all the time.
                node.holds.check(hold)
                self._check_clears(namespace)
                present = node.writer.present_leading(wanted)
            except KVStoreError:
                self.unpin(_pin_id(ref))
                raise
        finally:
            node.holds.release(hold)
        if not present:
            self.unpin(_pin_id(ref))
            return _no_pin(owner, namespace, node.clock.now_s())
        tokens = present * namespace.layout.chunk_tokens
        return PinRecord(_pin_id(ref), owner, namespace.name, tokens, node.clock.now_s() + seconds)

    def unpin(self, pin_id: str) -> bool:
        """Releases a pin; False where there is none. Raises InvalidRequest for what is no pin id, Unavailable."""
        owner, pin = _parsed_pin_id(pin_id)
        return self._pins.unpin(owner, pin, self.node.limits.meta_deadline_s)

    def pins(self) -> list[PinRecord]:
        """All live pins of the store."""
        with self._one_listing():
            refs = self._pins.list(timeout_s=self.node.limits.meta_deadline_s)
            return [self._record_of(ref) for ref in refs]

    def find_pin(self, pin_id: str) -> PinRecord | None:
        """A live pin by its id; None where there is none. Raises InvalidRequest for what is no pin id, Unavailable."""
        owner, pin = _parsed_pin_id(pin_id)
        refs = self._pins.list(owner, self.node.limits.meta_deadline_s)
        return next((self._record_of(ref) for ref in refs if ref.id == pin and ref.owner == owner), None)

    def refcount(self, chain: ChunkKeys) -> int:
        """Live pins that cover the last full chunk of the chain, and so all of it; 0 for an empty chain."""
        if not chain.addresses:
            return 0
        with self._one_listing():
            return self._pins.refcount(chain.addresses[-1], self.node.limits.meta_deadline_s)

    def clear_selected(
        self, selection: Selection, progress: Progress = unwatched, *, dry_run: bool = False, pinned: bool = False
    ) -> Cleared:
        """Deletes what a selection names, on the root and from the memory of all nodes, except what is pinned, unless
        ``pinned``; ``dry_run`` only counts. ``progress`` in shards, after the other nodes have answered.

        Raises InvalidRequest for an empty selection, Unavailable if the order could not be published, and what
        ``progress`` raises: each time, clear again.
        """
        order = resolved(self.node, selection)
        if (host := self._host_clearing) is not None:
            return (host.count if dry_run else host.clear)(order, progress, pinned=pinned)
        clearing = self._clearing(tuple if pinned else self._all_pinned)
        return clearing.count(order, progress) if dry_run else clearing.clear(order, progress)

    def begin_clear(self, selection: Selection, *, dry_run: bool, pinned: bool, **who: Any) -> OperationRun:
        """Begins to clear the selected chunks, as an operation. ``who`` are further arguments of ``Operations.begin``.

        Raises InvalidRequest for a selection of nothing, and what ``Operations.begin`` raises.
        """
        resolved(self.node, selection)

        def clear(operation: OperationRun) -> str:
            cleared = self.clear_selected(selection, operation.progress, dry_run=dry_run, pinned=pinned)
            operation.count(
                chunks=cleared.chunks,
                bytes=cleared.bytes,
                pinned=cleared.pinned,
                failed=cleared.failed,
                unconfirmed=len(cleared.unconfirmed),
            )
            message = ["dry run: nothing was deleted"] if dry_run else []
            if cleared.failed:
                message.append(f"{cleared.failed} chunks could not be deleted: clear again")
            if cleared.unconfirmed:
                sessions = [
                    *cleared.unconfirmed[:SESSIONS_SHOWN],
                    *["..."] * (len(cleared.unconfirmed) > SESSIONS_SHOWN),
                ]
                message.append(
                    f"{len(cleared.unconfirmed)} nodes did not confirm the clear (sessions {', '.join(sessions)}): "
                    "restart them"
                )
            return "; ".join(message)

        return self.node.operations.begin("clear", clear, unit="shards", **{"about": selection.describe(), **who})

    def clear(self, namespace: Namespace) -> Cleared:
        """Deletes the chunks of a namespace except pinned ones; no client can pin others while it deletes.

        Raises Unavailable also if it cannot publish the order to the nodes whose memory may have some: clear again.
        """
        order = ClearOrder(frozenset({namespace.id}), self.node.clock.now_s())
        deadline = Deadline(self.node.clock, self.node.limits.clear_deadline_s)

        def within(done: int, total: int) -> None:
            if deadline.passed:
                raise Unavailable(f"cleared {done} of {total} shards until the deadline: call again for the rest")

        clearing = self._host_clearing or self._clearing(self._all_pinned)
        cleared = clearing.clear(order, within)
        self.node.forget()  # what was read until it was deleted is known as present
        if cleared.failed:
            raise Unavailable(
                f"{cleared.failed} chunks or shards stay, because they are in use or the root refused: clear again"
            )
        return cleared

    def _clearing(self, pinned: Callable[[], Container[Address]]) -> NamespaceClear:
        return NamespaceClear(self.node, self.clears, pinned, is_alone=not self.in_cluster)

    def stats(self) -> dict[str, int | float]:
        """The node's counters, and the state of the session."""
        try:
            self.presence.current()
            alive = 1
        except KVStoreError:
            alive = 0
        protected = int(self.node.gc_view.protects and not self.is_beside_cluster)
        operations = self.meta.operations_count
        return {
            **self.node.stats(),
            "session_alive": alive,
            "protected": protected,
            "etcd_operations": operations,
            "bound_bytes": self.host.max_bytes if self.host is not None else 0,
            "bound_used_bytes": self.host.used_bytes if self.host is not None else 0,
            "collecting": int(self.host is not None and self.host.is_collecting),
            "etcd_silent_seconds": self.presence.silent_s,
            "lease_margin_seconds": self.presence.margin_s,
        }

    def close(self) -> None:
        """Ends the node and the session; idempotent. Does nothing in a forked child: the session is its parent's."""
        if self._pid != os.getpid():
            return
        if self._follower is not None:
            self._follower.close(CLOSE_S)
        if self._host_clearing is not None:
            self._host_clearing.clears.close()
        if self._syncing is not None:
            self._syncing.close()
        self.node.close()
        if self.host is not None:
            self.host.leave()
        self.presence.close()
        self.meta.close()

    @contextmanager
    def _one_listing(self) -> Iterator[None]:
        """One reader of all pins at a time: together they may be gigabytes. Raises Overloaded."""
        if not self._listing.acquire(timeout=self.node.limits.meta_deadline_s):
            raise Overloaded("other calls are reading all pins: back off")
        try:
            yield
        finally:
            self._listing.release()

    def _all_pinned(self) -> set[Address]:
        with self._one_listing():
            refs = self._pins.list(timeout_s=self.node.limits.meta_deadline_s)
            if self._twins is not None:
                refs = (*refs, *self._twins.unexpired())  # pins that etcd may have lost still count
            return {address for ref in refs for address in ref.addresses}

    def _check_clears(self, namespace: Namespace) -> None:
        """Raises Unavailable while a clear deletes chunks of a namespace."""
        for content in self.clears.in_progress(self.node.limits.meta_deadline_s):
            try:
                is_meant = ClearOrder.from_json(content).means(namespace.digest)
            except InvalidRequest:
                is_meant = True  # of a later version
            if is_meant:
                raise Unavailable(
                    f"chunks of {namespace.name!r} are being cleared, so they cannot be pinned now: pin again when "
                    "that is done (a clear that was killed counts for a minute)"
                )

    def _record_of(self, ref: Ref) -> PinRecord:
        try:
            namespace = self.find_namespace(ref.namespace)
        except KVStoreError:
            namespace = None
        name, tenant = (namespace.name, namespace.tenant) if namespace else (ref.namespace.hex(), "*")
        return PinRecord(_pin_id(ref), ref.owner, name, ref.tokens_count, ref.expires_s, tenant)


def _parsed_pin_id(pin_id: str) -> tuple[str, PinId]:
    """Owner and id."""
    owner, _, pin = pin_id.rpartition("/")
    parsed = parse_id(pin)
    if not owner or parsed is None:
        raise InvalidRequest(f"pin id {pin_id!r}: expected OWNER/{2 * ID_BYTES} hex digits, as pin and ls print it")
    return owner, PinId(parsed)


def _no_pin(owner: str, namespace: Namespace, now_s: float) -> PinRecord:
    return PinRecord("", owner, namespace.name, 0, now_s)


def _pin_id(ref: Ref) -> str:
    return f"{ref.owner}/{ref.id.hex()}"
