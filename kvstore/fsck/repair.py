"""Putting a root right while nodes go on using it: take, look, put.

A look at a file may be old when we act: a node may have quarantined it and put a good one at its name. So a file is
first *taken*: renamed to a quarantine name that nobody else uses. Then we *look* at the file there, where nobody can
change it any more, and *put* it back under the name that its own header gives, if it is whole and the name is free.
Else it stays in quarantine. A good file that was taken by mistake is missing for that moment, which is a miss.

At the end of the check we look at all that is in quarantine once more, and delete what is damaged still. So a file is
read at its name, after it was taken, and at the end before it is deleted, twice each time, and one whole reading of it
brings it back: a device that delivers wrong bytes for a moment costs nothing.
"""

from __future__ import annotations

import itertools
from hashlib import blake2b

from kvstore.address import Address
from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.format.header import Header
from kvstore.format.places import Name
from kvstore.fsck.report import Action
from kvstore.namespace import NamespaceId
from kvstore.root.fences import remove_tree
from kvstore.root.inspect import Broken, Inspector
from kvstore.root.interface import Root

CYCLE_MAX = 100
"""Files in each other's places, one after another, that are moved in one go."""

Outcome = tuple[Action, str]
"""The action taken, and a detail for the report."""


class Repairer:
    """Repairs one root under the name of ``session``, an id that nobody else has."""

    def __init__(self, root: Root, shard_bits: int, inspector: Inspector, session: bytes) -> None:
        self._root = root
        self._shard_bits = shard_bits
        self._inspector = inspector
        self._session = session
        self._numbers = itertools.count()

    def right_name(self, header: Header) -> Name:
        """The name at which the chunk of that header belongs."""
        return places.chunk(header.address, NamespaceId(header.namespace[:8]), self._shard_bits)

    def take(self, name: Name) -> Outcome:
        """Takes a chunk file from where it is, and puts it where it belongs."""
        return self._take(name, CYCLE_MAX)

    def _take(self, name: Name, depth_max: int) -> Outcome:
        aside = self._aside(name)
        try:
            if not self._root.move(name, aside):
                return Action.VANISHED, "gone when it was looked at again"
            action, detail = self._put(aside, depth_max)
        except KVStoreError as error:
            return Action.FAILED, str(error)
        if detail == f"as {name}":
            return Action.VANISHED, "sound when it was looked at again"
        return action, detail

    def settle(self, name: Name) -> Outcome:
        """Decides about a file in quarantine: a whole one goes back, a damaged one is deleted."""
        try:
            verdict = self._inspector.look(name, thorough=True)
            if isinstance(verdict, Broken):
                gone = not self._root.remove(name)
                return (Action.VANISHED, "") if gone else (Action.REMOVED, f"damaged ({verdict.damage.value})")
            return self._put(name, CYCLE_MAX)
        except KVStoreError as error:
            return Action.FAILED, str(error)

    def set_aside(self, name: Name) -> Outcome:
        """Takes a small file (a record) away, for the next writer to write it anew; the end of the check deletes it."""
        try:
            taken = self._root.move(name, self._aside(name))
        except KVStoreError as error:
            return Action.FAILED, str(error)
        return (Action.QUARANTINED, "") if taken else (Action.VANISHED, "")

    def remove(self, name: Name) -> Outcome:
        """Deletes a file that nobody will ever publish."""
        try:
            removed = self._root.remove(name)
        except KVStoreError as error:
            return Action.FAILED, str(error)
        return (Action.REMOVED, "") if removed else (Action.VANISHED, "")

    def remove_tree(self, folder: Name) -> Outcome:
        """Deletes a scratch folder of ours with all that is in it."""
        try:
            removed = remove_tree(self._root, folder)
        except KVStoreError as error:
            return Action.FAILED, str(error)
        return (Action.REMOVED, "") if removed else (Action.FAILED, "it is not empty")

    def _put(self, aside: Name, depth_max: int) -> Outcome:
        verdict = self._inspector.look(aside, thorough=True)
        if verdict is None:
            return Action.VANISHED, "another check was faster"
        if isinstance(verdict, Broken):
            return Action.QUARANTINED, verdict.damage.value
        right = self.right_name(verdict.header)
        occupant = self._inspector.look(right)
        if isinstance(occupant, Broken) or (occupant is not None and self.right_name(occupant.header) != right):
            # Two swapped files are in each other's way: the other one goes first. Publishing here would take the name
            # for taken, and delete what may be the only copy.
            if not depth_max:
                return Action.QUARANTINED, f"{right} is taken by another chunk"
            action, detail = self._take(right, depth_max - 1)
            if action is Action.FAILED:
                return Action.QUARANTINED, f"{right} is taken by another chunk: {detail}"
        won = self._root.publish(aside, right, durable=False)
        return (Action.RESTORED, f"as {right}") if won else (Action.REMOVED, f"{right} has a whole copy")

    def _aside(self, name: Name) -> Name:
        last = name.rpartition("/")[2]
        found = places.parse_chunk(last)
        # Something else than a chunk's name has no address; a digest of the name keeps entries apart.
        key = found[0] if found else blake2b(last.encode("utf-8", "surrogateescape"), digest_size=16).digest()
        return places.quarantined(Address(key), self._session, next(self._numbers))
