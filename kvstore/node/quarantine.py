"""Damaged and unreadable files, moved away from their names so that the next put can repair them.

Separate from the chunks of a root, which find out that a file is damaged.
"""

from __future__ import annotations

from contextlib import suppress

from kvstore.address import Address
from kvstore.counts import NodeCount
from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.format.header import Damage, Damaged, Expected
from kvstore.format.places import Name
from kvstore.node.chunk_runs import ChunkWriter
from kvstore.node.counters import Counters
from kvstore.node.encoded import NotDecodable
from kvstore.node.images import plain, verify_whole
from kvstore.node.known import Known
from kvstore.node.unreadable import Unreadable
from kvstore.root.interface import Root

_DAMAGE = {damage: NodeCount[f"DAMAGE_{damage.name}"] for damage in Damage}


class Quarantine:
    """The files of one root that this node sets aside. Called on lanes only."""

    def __init__(self, root: Root, writer: ChunkWriter, known: Known, counters: Counters) -> None:
        self._root = root
        self._writer = writer
        self._known = known
        self._counters = counters
        self.unreadable = Unreadable(root)

    def set_aside(self, expected: Expected, name: Name, damage: Damage) -> None:
        """Moves a damaged file away from its name, so that the next put can repair it. Never raises.

        Another node may have put a good file there between our look and our rename. So the moved file is verified once
        more under its new name, which nobody else uses. A good one goes back by link, unless yet another writer was
        first.
        """
        self._counters.add(NodeCount.MISS_DAMAGED)
        self._counters.add(_DAMAGE[damage])
        self._known.forget(expected.address)
        aside = places.quarantined(expected.address, self._writer.session(), next(self._writer.numbers))
        try:
            if not self._root.move(name, aside):
                return
            if self._is_intact(aside, expected):
                self._root.publish(aside, name, durable=False)
                self._counters.add(NodeCount.QUARANTINE_RESTORED)
            else:
                self._counters.add(NodeCount.QUARANTINED)
        except KVStoreError:
            # The root is read-only or failing: the read is a miss all the same, and the next read finds the file again.
            self._counters.add(NodeCount.QUARANTINE_FAILED)

    def settle(self, address: Address, name: Name) -> None:
        """Reads the file of an ``unreadable`` chunk again, and sets it aside if that fails too often.

        Raises the root's error, naming the file, if it can be neither read nor renamed.
        """
        self._known.forget(address)
        self.unreadable.settle(address, name, lambda: self._set_unreadable_aside(address, name))

    def _set_unreadable_aside(self, address: Address, name: Name) -> None:
        """Moves an unreadable file away as ``set_aside`` does. A file readable under its new name goes back; the next
        reader verifies it.

        Raises the root's error if the file cannot be moved.
        """
        aside = places.quarantined(address, self._writer.session(), next(self._writer.numbers))
        if not self._root.move(name, aside):
            return
        try:
            is_readable = self.unreadable.read(aside)
        except KVStoreError:
            self._counters.add(NodeCount.QUARANTINED)
            return
        if is_readable:
            with suppress(KVStoreError):  # on failure a collector puts it back
                self._root.publish(aside, name, durable=False)
                self._counters.add(NodeCount.QUARANTINE_RESTORED)

    def _is_intact(self, name: Name, expected: Expected) -> bool:
        found = self._root.open(name)
        if found is None:
            return False
        with found:
            try:
                reader = plain(found, expected, self._writer.encodings)
                if reader is None:
                    return False
                verify_whole(reader, expected)
            except NotDecodable:
                return True  # nothing proves damage: a node with its key may find it right
            except Damaged:
                return False
        return True
