"""The judge of the metadata file: what was committed, and so what a list and a watch must say.

It hears of each transaction at the moment of its COMMIT, which is the moment at which all processes can see it.

* M1: a list has the keys of one moment, that of its revision.
* M2: a watch tells every change under its prefix, once, in order.
* M3: a transaction is done only if what it compares holds at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore.meta.interface import Absent, Compare, Delete, Event, ModifiedAt, Put, Snapshot, ValueIs

Change = tuple[int, str, bytes | None]
"""A revision, a key, and its value from then on; None if it is gone."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a transaction, or the end of a lease, does at one revision if its compares hold."""

    revision: int
    operations: Sequence[Put | Delete]
    compares: Sequence[Compare]


class FileHistory:
    """All files of the run, by their inode: one that was removed has a history of its own."""

    def __init__(self, fail: Callable[[str], object]) -> None:
        self._fail = fail
        self._changes: dict[int, list[Change]] = {}

    def begins(self, inode: int, changes: Iterable[Change]) -> None:
        """A file that is a copy has these from the beginning."""
        self._changes[inode] = list(changes)

    def committed(self, inode: int, step: Step) -> None:
        """This was committed."""
        before = self._at(inode, 1 << 62)
        for compare in step.compares:
            found = before.get(compare.key)
            if not _holds(compare, found):
                self._fail(f"M3: a transaction was done, and {compare} did not hold: there was {found}")
        for operation in step.operations:
            value = bytes(operation.value) if isinstance(operation, Put) else None
            if value is not None or operation.key in before:
                self._changes.setdefault(inode, []).append((step.revision, operation.key, value))

    def listed(self, inode: int, prefix: str, found: Snapshot) -> None:
        """A list said this."""
        expected = {key: at for key, at in self._at(inode, found.revision).items() if key.startswith(prefix)}
        said = {kv.key: (kv.mod_revision, kv.value) for kv in found.items}
        if said != expected:
            wrong = sorted(key for key in said.keys() | expected if said.get(key) != expected.get(key))
            self._fail(f"M1: a list at revision {found.revision} is wrong in {wrong}")

    def watched(self, inode: int, prefix: str, first: int, behind: int, told: Sequence[Event]) -> None:
        """A watch told these events as all from revision ``first`` to before ``behind``."""
        expected = [
            change
            for change in self._changes.get(inode, ())
            if first <= change[0] < behind and change[1].startswith(prefix)
        ]
        said = [(event.revision, event.key, event.kv.value if event.kv else None) for event in told]
        if said != expected:
            self._fail(f"M2: a watch told {_keys(said)} for revisions {first} to {behind - 1}, not {_keys(expected)}")

    def _at(self, inode: int, revision: int) -> dict[str, tuple[int, bytes]]:
        """The keys at a revision, each with that of its last change."""
        found: dict[str, tuple[int, bytes]] = {}
        for at, key, value in self._changes.get(inode, ()):
            if at > revision:
                break
            if value is None:
                found.pop(key, None)
            else:
                found[key] = (at, value)
        return found


def _holds(compare: Compare, found: tuple[int, bytes] | None) -> bool:
    match compare:
        case Absent():
            return found is None
        case ModifiedAt():
            return found is not None and found[0] == compare.mod_revision
        case ValueIs():
            return found is not None and found[1] == compare.value


def _keys(changes: Iterable[Change]) -> str:
    return " ".join(f"{revision}:{key.rpartition('/')[2][:8]}" for revision, key, _ in changes) or "nothing"
