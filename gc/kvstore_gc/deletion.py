"""The victims of a sweep, and how they are deleted: renamed into the trash of the sweep, or removed by condition."""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from kvstore.core.address import ADDRESS_BYTES, Address
from kvstore.core.clock import Clock
from kvstore.core.namespace import NamespaceId
from kvstore.core.recency import NS_PER_S
from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.format.header import FIXED_BYTES, Incarnation, incarnation_at
from kvstore.format.places import Name
from kvstore.host.eviction import EvictionVictim
from kvstore.meta.sweeps import VICTIMS_MAX
from kvstore.root.fences import put_aside, restore
from kvstore.root.identity import read_small
from kvstore.root.interface import Root
from kvstore_gc.capacity import Pressure
from kvstore_gc.grace import Spared
from kvstore_gc.ledger import InFlight, SweepStore
from kvstore_gc.site import Site
from kvstore_gc.threads import inline

# The chunks that sweeps are to take, the exact list of what one sweep takes, and what one run took of it.
#
# The list is a small file on the root. etcd holds only what nodes need, so a collector that adopts a sweep reads
# from this list which publications it may delete.


CHECKSUM_BYTES = 16

_MAGIC = b"KVPLAN1\n"
_ENTRY = struct.Struct(f"<{ADDRESS_BYTES}s{places.NAMESPACE_ID_BYTES}sB{ADDRESS_BYTES}sQ")
_BYTES_MAX = len(_MAGIC) + VICTIMS_MAX * _ENTRY.size


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """The plan for one part: at most VICTIMS_MAX ``victims``."""

    part: int
    victims: Sequence[EvictionVictim]


@dataclass(frozen=True, slots=True)
class Condemnation:
    """One publication of one address. ``incarnation`` is shorter than 16 bytes if the file is (it is damaged then)."""

    address: Address
    namespace: NamespaceId
    incarnation: Incarnation
    size_bytes: int

    def name(self, shard_bits: int) -> Name:
        """The name of its file on the root."""
        return places.chunk(self.address, self.namespace, shard_bits)


class SweepOutcome:
    """The fate of the victims of one sweep in one run. Thread-safe.

    ``pressure`` is updated immediately after each chunk: the root's level must not lag by a whole sweep.
    """

    def __init__(self, pressure: Pressure | None = None) -> None:
        self._pressure = pressure
        self._lock = threading.Lock()
        self.reaped: list[Condemnation] = []
        self.restored_count = 0
        self.failed_count = 0
        self.failure = ""

    def reap(self, victim: Condemnation) -> None:
        """Counts a victim that was deleted."""
        with self._lock:
            self.reaped.append(victim)
        if self._pressure is not None:
            self._pressure.accounts.deleted(victim.size_bytes)

    def put_back(self) -> None:
        """Counts a file that was another publication than the condemned one, and went back."""
        with self._lock:
            self.restored_count += 1

    def fail(self, error: Exception) -> None:
        """Counts a victim that could not be taken or deleted; the others can."""
        with self._lock:
            self.failed_count += 1
            self.failure = str(error)


def write_victims(root: Root, sweep: bytes, victims: Sequence[Condemnation], staged: Name, clock: Clock) -> bytes:
    """Writes the list of a sweep by way of ``staged``, synced; returns its checksum, by which it is found.

    Raises the root's errors.
    """
    assert len(victims) <= VICTIMS_MAX
    entries = (
        _ENTRY.pack(one.address, one.namespace, len(one.incarnation), one.incarnation, one.size_bytes)
        for one in victims
    )
    content = _MAGIC + b"".join(entries)
    checksum = _checksum(content)
    try:
        root.stage(staged, [memoryview(content)], stamp_ns=int(clock.now_s()) * NS_PER_S, durable=True)
        root.publish(staged, places.plan(sweep, checksum), durable=True)
    finally:
        root.discard(staged)
    return checksum


def read_victims(root: Root, sweep: bytes, checksum: bytes) -> tuple[Condemnation, ...] | None:
    """The list of a sweep; None if it is gone or damaged: then nothing may be taken. Raises the root's errors."""
    content = read_small(root, places.plan(sweep, checksum), _BYTES_MAX)
    if content is None or not content.startswith(_MAGIC) or _checksum(content) != checksum:
        return None
    return tuple(
        Condemnation(Address(address), NamespaceId(namespace), Incarnation(incarnation[:size]), size_bytes)
        for address, namespace, size, incarnation, size_bytes in _ENTRY.iter_unpack(content[len(_MAGIC) :])
    )


def _checksum(content: bytes) -> bytes:
    return blake2b(content, digest_size=CHECKSUM_BYTES, person=b"kvstore.plan.1").digest()


# Taking chunks on an object store, where nothing can be fenced but deletion can be conditional.
#
# A run that was paused may delete at any later time. So the list is made final in etcd before the first deletion.
# Every run deletes only from that list, and only the publication that it names. The sweep closes only when all of it
# is gone: a late deletion can then only miss (rule O1).


class Deleting:
    """Conditional deletion on one root."""

    def __init__(self, site: Site, ledger: SweepStore) -> None:
        self._site = site
        self._root = site.root
        self._ledger = ledger
        self._shard_bits = site.identity.shard_bits

    def reap(
        self, sweep: InFlight, victims: Sequence[Condemnation] | None, spared: Spared, taken: SweepOutcome
    ) -> bool:
        """Makes the list final and deletes its publications. True when all are gone, so that the sweep may close.

        ``victims`` is None if the list cannot be read. A final list then keeps its sweep open, because what a
        paused run may still delete is unknown (``kvstore fsck --adopt`` ends it).
        """
        if not sweep.record.is_final:
            settled = self._settle(sweep, [one for one in victims or () if one.address not in spared])
            if settled is None:
                return False  # closed by another run
            victims = read_victims(self._root, sweep.sweep, settled.record.plan_checksum)
        if victims is None:
            return False
        self._site.each(len(victims), lambda index: self._delete(victims[index], taken))
        return self._are_gone(victims)

    def _settle(self, sweep: InFlight, spared: Sequence[Condemnation]) -> InFlight | None:
        staging = self._site.ids.fresh()
        checksum = write_victims(self._root, sweep.sweep, spared, places.staged(staging, 0), self._site.clock)
        self._root.remove_folder(places.staging_folder(staging))
        settled = self._ledger.settle(sweep, replace(sweep.record, plan_checksum=checksum, is_final=True))
        if settled is None or settled.record.plan_checksum != checksum:
            self._root.remove(places.plan(sweep.sweep, checksum))  # another run's list is the final one
        return settled

    def _delete(self, victim: Condemnation, taken: SweepOutcome) -> None:
        name = victim.name(self._shard_bits)
        try:
            seen = self._root.look(name, FIXED_BYTES)
            if seen is None or incarnation_at(seen.prefix) != victim.incarnation:
                return
            # The look and the deletion are of one version of the object: the store compares.
            if self._root.remove_if(name, seen):
                taken.reap(victim)
        except KVStoreError as error:
            taken.fail(error)  # it keeps the sweep open, and no other victim

    def _are_gone(self, victims: Sequence[Condemnation]) -> bool:
        left: list[Condemnation] = []

        def look(index: int) -> None:
            seen = self._root.look(victims[index].name(self._shard_bits), FIXED_BYTES)
            if seen is not None and incarnation_at(seen.prefix) == victims[index].incarnation:
                left.append(victims[index])

        self._site.each(len(victims), look)
        return not left


# Taking chunks on a root that can be fenced: rename into the sweep's folder, look there, then delete or put back.
#
# The rename is the only destructive step. It succeeds only while the folder exists, and no process makes that
# folder again (rules F1, F2). It may take a newer publication than the condemned one, so the collector checks each
# entry in the folder, where no other process can change it any more (rule G5).


log = logging.getLogger(__name__)

FEW = 16
"""So many victims are taken by one thread."""
ROUNDS_MAX = 100
"""Attempts to empty the folder: each run that was paused may fill it once more."""


class Trash:
    """The trash folders of one root."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._root = site.root
        self._shard_bits = site.identity.shard_bits

    def open(self, sweep: bytes) -> None:
        """Makes the folder of a sweep that no other process knows yet (rule F2)."""
        self._root.make_folder(places.trash_folder(sweep))

    def reap(self, sweep: InFlight, victims: Sequence[Condemnation], spared: Spared, taken: SweepOutcome) -> bool:
        """Takes each victim that is not spared, then lifts the fence; False if the fence could not be lifted.

        Only after the sweep's grace (``Grace.decide``): ``spared`` is the proof of it.
        """
        free = [one for one in victims if one.address not in spared]
        # A name of its own in each run: a name used twice could be replaced between another run's look and its unlink.
        run = self._site.ids.fresh()[: places.RUN_ID_BYTES]

        def take(index: int) -> None:
            name = free[index].name(self._shard_bits)
            entry = places.trashed(sweep.sweep, name, run)
            try:
                if self._root.move(name, entry, make_folder=False):
                    self._settle(entry, free[index], taken)
            except KVStoreError as error:
                taken.fail(error)

        (self._site.each if len(free) > FEW else inline)(len(free), take)
        return self._fence(sweep, victims, taken)

    def _fence(self, sweep: InFlight, victims: Sequence[Condemnation], taken: SweepOutcome) -> bool:
        """Empties the folder and removes it, synced: after that nothing can be taken. False if it keeps filling.

        ``victims`` are all the condemned ones, also those spared: what other runs took is judged by them.
        """
        folder = places.trash_folder(sweep.sweep)
        condemned = {victim.address: victim for victim in victims}
        unseen: set[Name] = set()
        for _ in range(ROUNDS_MAX):
            if self._root.remove_folder(folder, durable=True):
                return True
            failed: KVStoreError | None = None
            for listed in list(self._root.list(folder)):
                name, found = Name(f"{folder}/{listed.name}"), places.parse_trashed(listed.name)
                try:
                    if found is None or listed.stat is None or name in unseen:
                        put_aside(self._root, name)
                    elif not self._settle(name, condemned.get(found[0]), taken):
                        unseen.add(name)  # settled by another run, or nothing that can be looked at
                except KVStoreError as error:
                    failed = error
            if failed is not None:
                raise failed
        return False

    def _settle(self, entry: Name, victim: Condemnation | None, taken: SweepOutcome) -> bool:
        """Deletes an entry that is the condemned publication; puts any other back, unless a newer one has its name.

        One that cannot be looked at is set aside; ``Orphans`` puts it back if it turns out to be whole.

        False if there is no such file.
        """
        try:
            seen = self._root.look(entry, FIXED_BYTES)
        except KVStoreError as error:
            taken.fail(error)  # once: nothing of it is left to look at in the next run
            self._set_aside(entry)
            return True
        if seen is None:
            return False
        if victim is not None and incarnation_at(seen.prefix) == victim.incarnation:
            if self._remove(entry):
                taken.reap(victim)
        elif restore(self._root, entry, self._shard_bits):
            taken.put_back()
        return True

    def _remove(self, entry: Name) -> bool:
        """Deletes a condemned entry, or sets it aside if it cannot be deleted."""
        try:
            return self._root.remove(entry)
        except KVStoreError as error:
            log.warning("sweep.undeletable %s: %s", entry, error)
            return self._set_aside(entry)

    def _set_aside(self, entry: Name) -> bool:
        """Moves an entry to the quarantine, so that its sweep can end."""
        found = places.parse_trashed(entry.rpartition("/")[2])
        assert found is not None, "other entries are put aside"
        return self._root.move(entry, places.quarantined(found[0], self._site.ids.fresh(), 0))
