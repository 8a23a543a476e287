"""Taking chunks on a root that can be fenced: rename into the sweep's folder, look there, then delete or put back.

The rename is the only destructive step. It succeeds only while the folder exists, and nobody makes that folder again
(rules F1, F2). It may take a newer publication than the condemned one, so each entry is looked at in the folder, where
nobody can change it any more (rule G5).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.format.header import FIXED_BYTES, incarnation_at
from kvstore.format.places import Name
from kvstore.root.fences import put_aside, restore
from kvstore_gc.grace import Spared
from kvstore_gc.ledger import InFlight
from kvstore_gc.site import Site
from kvstore_gc.threads import inline
from kvstore_gc.victims import Condemnation, Taken

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
        """Makes the folder of a sweep that nobody else knows yet (rule F2)."""
        self._root.make_folder(places.trash_folder(sweep))

    def reap(self, sweep: InFlight, victims: Sequence[Condemnation], spared: Spared, taken: Taken) -> bool:
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

    def _fence(self, sweep: InFlight, victims: Sequence[Condemnation], taken: Taken) -> bool:
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

    def _settle(self, entry: Name, victim: Condemnation | None, taken: Taken) -> bool:
        """Deletes an entry that is the condemned publication; puts any other back, unless a newer one has its name.

        False if there is no such file.
        """
        seen = self._root.look(entry, FIXED_BYTES)
        if seen is None:
            return False
        if victim is not None and incarnation_at(seen.prefix) == victim.incarnation:
            if self._remove(entry, victim):
                taken.reap(victim)
        elif restore(self._root, entry, self._shard_bits):
            taken.put_back()
        return True

    def _remove(self, entry: Name, victim: Condemnation) -> bool:
        """Deletes a condemned entry. Sets it aside if it cannot be deleted, so that its sweep can end."""
        try:
            return self._root.remove(entry)
        except KVStoreError as error:
            log.warning("sweep.undeletable %s: %s", entry, error)
            aside = places.quarantined(victim.address, self._site.ids.fresh(), 0)
            return self._root.move(entry, aside)
