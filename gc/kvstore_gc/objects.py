"""Taking chunks on an object store, where nothing can be fenced but deletion can be conditional.

A run that was paused may delete at any later time. So the list is made final in etcd before the first deletion. Every
run deletes only from that list, and only the publication that it names. The sweep closes only when all of it is gone: a
late deletion can then only miss (rule O1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvstore.format import places
from kvstore.format.header import FIXED_BYTES, incarnation_at
from kvstore_gc.grace import Spared
from kvstore_gc.ledger import InFlight, Ledger
from kvstore_gc.site import Site
from kvstore_gc.victims import Condemnation, Taken, read_victims, write_victims


class Deleting:
    """Conditional deletion on one root."""

    def __init__(self, site: Site, ledger: Ledger) -> None:
        self._site = site
        self._root = site.root
        self._ledger = ledger
        self._shard_bits = site.identity.shard_bits

    def reap(self, sweep: InFlight, victims: Sequence[Condemnation] | None, spared: Spared, taken: Taken) -> bool:
        """Makes the list final and deletes its publications. True when all are gone, so that the sweep may close.

        ``victims`` is None if the list cannot be read. A final list then keeps its sweep open, because nobody knows
        what a run that was paused may still delete (``kvstore fsck --adopt`` ends it).
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

    def _delete(self, victim: Condemnation, taken: Taken) -> None:
        name = victim.name(self._shard_bits)
        seen = self._root.look(name, FIXED_BYTES)
        # The look and the deletion are of one version of the object: the store compares.
        if seen is not None and incarnation_at(seen.prefix) == victim.incarnation and self._root.remove_if(name, seen):
            taken.reap(victim)

    def _are_gone(self, victims: Sequence[Condemnation]) -> bool:
        left: list[Condemnation] = []

        def look(index: int) -> None:
            seen = self._root.look(victims[index].name(self._shard_bits), FIXED_BYTES)
            if seen is not None and incarnation_at(seen.prefix) == victims[index].incarnation:
                left.append(victims[index])

        self._site.each(len(victims), look)
        return not left
