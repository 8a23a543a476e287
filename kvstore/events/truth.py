"""The chunks that the root holds, and those about to go, for all namespaces that are told; kept up to date by steps.

The order of a step matters. What is condemned is taken back first, because the promise for removals is the shortest.
A shard is listed after the end of its sweep was heard, so what the listing finds was spared.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.errors import KVStoreError
from kvstore.events.doomed import Doomed, News
from kvstore.events.folders import Folders
from kvstore.events.identities import ROWS_MAX, read_identities
from kvstore.events.inventory import KEY_MAX, Difference, Inventory
from kvstore.events.limits import EventLimits
from kvstore.events.table import Rows
from kvstore.events.wholes import Part, Wholes
from kvstore.format import places
from kvstore.format.columns import NameColumns, parse_names
from kvstore.namespace import Namespace
from kvstore.root.changes import folder_time, list_names
from kvstore.root.interface import Root
from kvstore.root.namespaces import read_namespaces
from kvstore.sources import Clock

log = logging.getLogger(__name__)

STRANGERS_S = 10.0
"""Records of namespaces that are not told are read again after so long."""

Wanted = Callable[[Namespace], bool]


@dataclass(slots=True)
class Model:
    """One namespace and its inventory."""

    namespace: Namespace
    inventory: Inventory
    unknown: Rows
    """Rows whose files are still to be read."""


class Truth:
    """The namespaces of one root. One thread steps; ``lock`` guards inventories for those who only ask."""

    def __init__(
        self,
        root: Root,
        shard_bits: int,
        doomed: Doomed,
        wanted: Wanted,
        limits: EventLimits,
        clock: Clock,
        folder: str | None = None,
    ) -> None:
        """``wanted`` says which namespaces are told; ``folder`` is where their tokens go."""
        self.lock = threading.Condition()
        self.models: dict[int, Model] = {}
        """By namespace id, as a number."""
        self._root = root
        self._shard_bits = shard_bits
        self._doomed = doomed
        self._wanted = wanted
        self._limits = limits
        self._clock = clock
        self._folder = folder
        self._folders = Folders(1 << shard_bits, limits)
        self._wholes = Wholes()
        self._looked_s = float("-inf")
        self._strangers: set[int] = set()
        """Namespaces that are not wanted, or had no readable record a moment ago."""
        self._strangers_s = 0.0
        self._quarantined: set[str] = set()

    @property
    def is_complete(self) -> bool:
        """True once all that was there at the start is known."""
        return self._folders.is_complete and not any(len(model.unknown) for model in self.models.values())

    def step(self) -> None:
        """Applies news, lists some shards and reads some files. Raises the errors of root and etcd."""
        self._apply(self._doomed.news())
        began_s = now_s = self._clock.monotonic_s()
        if now_s - self._looked_s >= self._limits.step_s:
            self._looked_s = now_s
            self._look_at_quarantine()
            for shard in self._folders.to_look_at():
                self._folders.looked(shard, folder_time(self._root, places.shard_folder(shard)), now_s)
        listed: dict[int, list[str]] = {}
        try:
            while now_s - began_s < self._limits.step_s and (due := self._folders.due(now_s)) is not None:
                listed[due] = self._list(due)
                now_s = self._clock.monotonic_s()
        finally:
            if listed:
                self._apply_listed(listed)
        for model in list(self.models.values()):
            self._identify(model)

    @property
    def is_busy(self) -> bool:
        """True if another step has something to do at once."""
        return self._folders.due(self._clock.monotonic_s()) is not None or not self.is_complete

    def reread(self) -> None:
        """Reads etcd afresh at the next step: it may be another one than before, restored from a snapshot."""
        self._doomed.close()

    def settle(self) -> list[tuple[Model, Difference]]:
        """Returns what is to be told since the last call, for each namespace with changes."""
        found = []
        with self.lock:
            parts = {number: Part(each.namespace, each.inventory) for number, each in self.models.items()}
            self._wholes.judge(parts)
            for model in self.models.values():
                difference = model.inventory.settle()
                if len(difference.removed) or len(difference.stored):
                    found.append((model, difference))
        return found

    def compact(self) -> None:
        """Gives memory back where much is no longer there. Rows change: call it when no difference is in use."""
        with self.lock:
            for model in self.models.values():
                if not len(model.unknown):
                    model.inventory.compact()

    def close(self) -> None:
        """Ends the watches, and gives files back. Idempotent."""
        self._doomed.close()
        with self.lock:
            for model in self.models.values():
                model.inventory.close()
            self.models = {}

    # News

    def _apply(self, news: News) -> None:
        for shard in news.ended:
            self._folders.must_list(shard)
        if news.clear_ended:
            self._folders.must_list(None)
        with self.lock:
            for shard in news.begun:
                self._condemn(shard)
            if news.clear_begun:
                for number in self.models:
                    self._hide(number)

    def _condemn(self, shard: int) -> None:
        """Condemns what a sweep in flight is about to take."""
        members = self._doomed.condemned(shard)
        if members is None:
            return
        for model in self.models.values():
            rows = model.inventory.between(*self._range(shard))
            if len(rows):
                model.inventory.condemn(rows[members.among(model.inventory.rows.addresses(rows).tobytes())])

    def _hide(self, number: int) -> None:
        """Condemns all of a namespace that a clear is deleting."""
        if self._doomed.hides(number.to_bytes(8, "big")):
            inventory = self.models[number].inventory
            inventory.condemn(inventory.between(0, KEY_MAX))

    def _look_at_quarantine(self) -> None:
        """Takes back chunks that were set aside as damaged, unless they are there again."""
        names = set(list_names(self._root, places.QUARANTINE))
        new, self._quarantined = names - self._quarantined, names
        for name in new:
            address = places.parse_quarantined(name)
            if address is None:
                continue
            first = np.array([int.from_bytes(address[:8], "big")], np.uint64)
            for model in self.models.values():
                chunk = places.chunk(address, model.namespace.id, self._shard_bits)
                if self._root.stat(chunk) is None:
                    with self.lock:
                        model.inventory.left(first)

    # Listing

    def _list(self, shard: int) -> list[str]:
        """Returns the names in a shard's folder."""
        folder, began_s = places.shard_folder(shard), self._clock.monotonic_s()
        time = folder_time(self._root, folder)
        names = list_names(self._root, folder)
        self._folders.listed(shard, time, began_s, self._clock.monotonic_s())
        return names

    def _apply_listed(self, listed: Mapping[int, list[str]]) -> None:
        """Notes listings by shard, many at once: each alone would cost as much."""
        found = parse_names([name for names in listed.values() for name in names])
        try:
            self._meet(found)
        except KVStoreError:
            for shard in listed:
                self._folders.must_list(shard)
            raise
        folders = np.repeat(np.array(list(listed), np.uint64), [len(names) for names in listed.values()])[found.ours]
        in_place = folders == found.firsts >> np.uint64(64 - self._shard_bits)
        ranges = [self._range(shard) for shard in listed]
        with self.lock:
            for number, model in self.models.items():
                mine = in_place & (found.namespaces == np.uint64(number))
                # What is here now was spared by every sweep that has ended; those in flight condemn theirs again.
                model.inventory.listed(ranges, found.firsts[mine], found.lasts[mine])
            for shard in listed:
                self._condemn(shard)
            for number in self.models:
                self._hide(number)

    def _meet(self, found: NameColumns) -> None:
        """Reads the records of namespaces that were not there before."""
        now_s = self._clock.monotonic_s()
        if now_s - self._strangers_s >= STRANGERS_S:
            self._strangers, self._strangers_s = set(), now_s
        new = set(np.unique(found.namespaces).tolist()) - self.models.keys() - self._strangers
        if not new:
            return
        for namespace in read_namespaces(self._root):
            number = int.from_bytes(namespace.id, "big")
            if number in new and self._wanted(namespace):
                inventory = Inventory(namespace.layout.chunk_tokens, self._folder, namespace.digest)
                with self.lock:
                    self.models[number] = Model(namespace, inventory, np.zeros(0, np.int32))
        self._strangers |= new - self.models.keys()

    def _identify(self, model: Model) -> None:
        """Reads the files of some chunks that came."""
        with self.lock:
            rows = np.unique(np.concatenate([model.unknown, model.inventory.unknown()]))
        now, model.unknown = rows[:ROWS_MAX], rows[ROWS_MAX:]
        if not len(now):
            return
        read = read_identities(self._root, self._shard_bits, model.namespace, model.inventory, now)
        with self.lock:
            model.inventory.learn(read.found)
            model.inventory.learn(read.blocks)
            model.inventory.refuse(read.odd)
            model.inventory.retry(read.failed)

    def _range(self, shard: int) -> tuple[int, int]:
        """Returns the first and the last number that 8 bytes of an address in this shard can begin with."""
        shift = 64 - self._shard_bits
        return shard << shift, ((shard + 1) << shift) - 1
