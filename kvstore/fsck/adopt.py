"""Telling an empty, restored or foreign etcd what the root knows: losing the metadata is not losing the data (rule C6).

Chunk files and namespace records describe themselves, and pins have twins. All else that etcd holds belongs to
processes, which make it again: so their sessions are ended, and what sweeps have begun is undone.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field

from kvstore.core.clock import Clock, RandomIds, SystemClock
from kvstore.core.namespace import Namespace
from kvstore.errors import InvalidRequest, KVStoreError, LayoutMismatch, RootMismatch, Unavailable
from kvstore.format import places
from kvstore.format.header import Generation
from kvstore.format.places import Name
from kvstore.fsck.check import read_record
from kvstore.meta.keys import Keys
from kvstore.meta.namespaces import Namespaces
from kvstore.meta.pins import StoredPin
from kvstore.meta.store import (
    OPERATIONS_MAX,
    Absent,
    Compare,
    Delete,
    KeyValue,
    LeaseGone,
    MetadataStore,
    ModifiedAt,
    Put,
)
from kvstore.meta.sweeps import NO_NONCE, Seq
from kvstore.root.fences import lift, list_twins, read_twin
from kvstore.root.identity import RootIdentity, newest_number, publish, read_claim
from kvstore.root.interface import Root

ROUNDS_MAX = 20
"""Sweeps that begin while we undo others are undone in another round; collectors of the old generation end by then."""


@dataclass(slots=True)
class Adopted:
    """The outcome. ``generation`` is the root's from now on, ``previous`` the one before (0: it had none)."""

    previous: int = 0
    generation: int = 0
    sessions_count: int = 0
    """Sessions of nodes and collectors that were ended; those that live begin new ones by themselves."""
    trash_count: int = 0
    """Sweeps whose chunks were put back."""
    condemned_count: int = 0
    """Sweeps that etcd named, and names no more."""
    added_count: int = 0
    """Namespaces that etcd has now and did not have."""
    known_count: int = 0
    """Namespaces that it had."""
    pins_restored_count: int = 0
    """Pins that etcd has again."""
    pins_known_count: int = 0
    """Pins with a twin that it had."""
    pins_ended_count: int = 0
    """Twins of pins that are past their time: left to collectors."""
    refused: list[str] = field(default_factory=list)
    """Namespace records and twins that were left out, and why: unreadable, or a name that has another layout."""


def adopt(
    root: Root,
    identity: RootIdentity,
    meta: MetadataStore,
    *,
    clock: Clock | None = None,
) -> Adopted:
    """Makes root and ``meta`` one generation again. May be killed at any point, and repeated.

    Nodes may run: those of ``meta`` lose their sessions, and protect nothing until the end of this; what those of
    another etcd hold, no collector of ``meta`` will ever know of, which costs them misses. Collectors of another etcd
    must not run, since an adoption cannot end their sessions.

    Raises the root's errors, Unavailable and PermissionDenied of the metadata store, Unavailable if another adoption
    runs or a collector goes on condemning.
    """
    return _Adoption(root, identity, meta, clock or SystemClock()).run()


class _Adoption:
    """One adoption; a method per step, in their order."""

    def __init__(self, root: Root, identity: RootIdentity, meta: MetadataStore, clock: Clock) -> None:
        self._root = root
        self._shard_bits = identity.shard_bits
        self._meta = meta
        self._keys = Keys(identity.root)
        self._clock = clock
        self._ids = RandomIds()
        self._done = Adopted()

    def run(self) -> Adopted:
        before = self._meta.get(self._keys.generation)
        # First of all, so that root and etcd differ from here until the last step: a session that begins in between
        # protects nothing and promises nothing, and one that began before is in the list that is revoked next.
        mine = self._next_generation()
        self._end_sessions()
        self._undo_sweeps()
        self._namespaces()
        self._pins()
        # Sessions that begin before this protect nothing, and their nodes see when the adoption ends. Afterwards an
        # adoption must not end a session: it could be one that protects.
        self._agree(mine, before)
        return self._done

    def _next_generation(self) -> Generation:
        self._done.previous = newest_number(self._root)
        mine = Generation(self._done.previous + 1, self._ids.fresh())
        if publish(self._root, mine, ids=self._ids, clock=self._clock) != mine:
            raise _another_adoption()
        self._done.generation = mine.number
        return mine

    def _end_sessions(self) -> None:
        """Sessions of nodes, whose views and announcements may be of another history, and of collectors."""
        for prefix in (self._keys.sessions, self._keys.collectors):
            for kv in self._meta.list(prefix).items:
                if kv.lease:
                    self._meta.revoke(kv.lease)
                else:
                    self._meta.delete(kv.key)  # no lease would ever end it
                self._done.sessions_count += 1

    def _undo_sweeps(self) -> None:
        """Fences every sweep, puts back what it took, and only then drops its key (rules F1, C1).

        The folder of a sweep is made before its key is put: what the keys of one reading name is on the root, or was.
        """
        for _ in range(ROUNDS_MAX):
            found = self._meta.list(self._keys.gc).items
            for entry in list(self._root.list(places.TRASH)):
                sweep = places.parse_sweep(entry.name)
                if sweep is not None and entry.stat is None:
                    self._lift(sweep)
            if self._drop_condemned(found):
                return
        raise Unavailable("a collector goes on condemning: stop all collectors, then adopt again")

    def _lift(self, sweep: bytes) -> None:
        if not lift(self._root, sweep, self._shard_bits, lambda: False):
            raise Unavailable(
                f"{places.trash_folder(sweep)} is being filled faster than it can be emptied: stop all collectors, "
                "then adopt again"
            )
        self._done.trash_count += 1

    def _drop_condemned(self, found: tuple[KeyValue, ...]) -> bool:
        """Deletes the keys of sweeps, with a new link of their chain; False if it has grown since they were read."""
        condemned = [kv for kv in found if kv.key.startswith(self._keys.condemned)]
        seq = next((kv for kv in found if kv.key == self._keys.gc_seq), None)
        compare: Compare = Absent(self._keys.gc_seq) if seq is None else ModifiedAt(self._keys.gc_seq, seq.mod_revision)
        prev = _nonce(seq)
        size = OPERATIONS_MAX - 1
        # At least one link, also where nothing is condemned: no announcement of the old chain succeeds after it.
        for start in range(0, max(1, len(condemned)), size):
            batch = condemned[start : start + size]
            link = Seq(self._ids.fresh(), prev)
            put = Put(self._keys.gc_seq, link.to_json())
            result = self._meta.txn((compare,), (put, *(Delete(kv.key) for kv in batch)))
            if not result.succeeded:
                return False
            self._done.condemned_count += len(batch)
            compare, prev = ModifiedAt(self._keys.gc_seq, result.revision), link.nonce
        return True

    def _namespaces(self) -> None:
        namespaces = Namespaces(self._meta, self._keys)
        for name, namespace in _records(self._root, self._done.refused):
            try:
                if namespaces.find(namespace.digest) is not None:
                    self._done.known_count += 1
                    continue
                namespaces.claim(namespace)
            except (LayoutMismatch, RootMismatch, InvalidRequest) as error:
                self._done.refused.append(f"{name}: {error}")
            else:
                self._done.added_count += 1

    def _pins(self) -> None:
        """Puts the key of every twin that has none, under a lease of the time that is left."""
        for name in list(list_twins(self._root)):
            content = read_twin(self._root, name)
            if content is None:
                continue  # unpinned since it was listed
            try:
                record = StoredPin.from_bytes(content, name)
                key = self._keys.ref(record.owner, record.id)
                if places.twin(record.owner, record.id) != name:
                    raise RootMismatch(f"{name} is the twin of pin {record.owner}/{record.id.hex()}")
            except (RootMismatch, InvalidRequest) as error:
                self._done.refused.append(f"{error} It stops collectors: see deploy/RUNBOOK.md")
                continue
            left_s = math.ceil(record.expires_s - self._clock.now_s())
            if left_s <= 0:
                self._done.pins_ended_count += 1
            elif self._put_ref(key, content, min(left_s, record.ttl_s)):
                self._done.pins_restored_count += 1
            else:
                self._done.pins_known_count += 1

    def _put_ref(self, key: str, content: bytes, ttl_s: int) -> bool:
        """Puts the key of a pin under a lease; False if there is one already."""
        if self._meta.get(key) is not None:
            return False
        lease = self._meta.grant(ttl_s)
        try:
            put = self._meta.txn((Absent(key),), (Put(key, content, lease),)).succeeded
        except LeaseGone:
            return False  # it expired before the put
        except KVStoreError:
            with suppress(KVStoreError):
                self._meta.revoke(lease)
            raise
        if not put:
            self._meta.revoke(lease)
        return put

    def _agree(self, mine: Generation, before: KeyValue | None) -> None:
        """The last step: gives etcd the root's generation, unless another process has changed either since."""
        if newest_number(self._root) != mine.number:
            raise _another_adoption()
        key = self._keys.generation
        compare: Compare = Absent(key) if before is None else ModifiedAt(key, before.mod_revision)
        if not self._meta.txn((compare,), (Put(key, mine.to_json()),)).succeeded:
            raise _another_adoption()


def _another_adoption() -> Unavailable:
    return Unavailable(
        "another `kvstore fsck --adopt` of this root runs at the same time: let one end, then adopt again"
    )


def _nonce(seq: KeyValue | None) -> bytes:
    try:
        return NO_NONCE if seq is None else Seq.from_json(seq.value).nonce
    except RootMismatch:
        return NO_NONCE  # an unreadable chain cannot be continued


def _records(root: Root, refused: list[str]) -> list[tuple[Name, Namespace]]:
    """The readable records, those first whose layout the root's own claim names: etcd keeps the first of a name."""
    found = []
    for entry in root.list(places.NAMESPACES):
        name = Name(f"{places.NAMESPACES}/{entry.name}")
        if entry.stat is None or not entry.name.endswith(".json"):
            continue
        try:
            namespace = read_record(root, name)
        except InvalidRequest as error:
            refused.append(f"{name}: {error}")
            continue
        if namespace is not None:
            found.append((_is_claimed(root, namespace), name, namespace))
    return [(name, namespace) for _, name, namespace in sorted(found, key=lambda record: (not record[0], record[1]))]


def _is_claimed(root: Root, namespace: Namespace) -> bool:
    try:
        return read_claim(root, namespace) == namespace.layout
    except RootMismatch:
        return False
