"""Quarantine, where nodes set files aside: whole ones go back, damaged ones are deleted, in time or for their room.

Unlike other leftovers, each file is read before anything is decided. Damaged files are worth nothing to engines, and
must not keep room that chunks need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.errors import PermissionDenied, Unavailable
from kvstore.format import places
from kvstore.format.header import Header
from kvstore.format.places import Name
from kvstore.meta.keys import parse_id
from kvstore.namespace import NamespaceId
from kvstore.recency import NS_PER_S
from kvstore.root.inspect import Broken, Inspector, Whole
from kvstore.root.interface import Root, Stat
from kvstore_gc.capacity import HEADROOM_SHARE, Accounts, Level
from kvstore_gc.site import Site

REMEMBERED_MAX = 100_000
"""Names of each kind remembered from round to round; those beyond it are looked at in every round."""


@dataclass(frozen=True, slots=True)
class _Damaged:
    """A damaged file, and whether it may go."""

    name: Name
    stat: Stat
    may_go: bool


class Quarantine:
    """The quarantine folder of one root. One thread at a time. Remembers which files it need not read again."""

    def __init__(self, site: Site, accounts: Accounts | None = None) -> None:
        self._root = site.root
        self._shard_bits = site.identity.shard_bits
        self._inspector = Inspector(site.root, monotonic_s=site.clock.monotonic_s)
        self._timings = site.timings
        self._accounts = accounts
        self._damaged: set[Name] = set()
        self._unreadable: set[Name] = set()

    def clear(self, now_s: float, done: Counter[str], check: Callable[[], object]) -> None:
        """Puts whole files back; deletes damaged ones that are old, or take more room than they may, oldest first.

        While chunks are evicted for the capacity there is no space for them, else ``quarantine_share`` of it.

        The node that set a file aside looks at it there and puts a whole one back itself. We do it if that node died in
        between, or at the same moment. Both publish, which never replaces: one of them finds the name taken or the
        source gone, and either is fine. If a newer chunk has the name, it stays, and ours is deleted.

        Age is that of the mtime, the last use of the chunk: nothing is written to a file when it is set aside.
        """
        left = sorted(self._looked_at(done, check), key=lambda each: each.stat.mtime_ns)
        self._damaged = {each.name for each in left[:REMEMBERED_MAX] if each.name not in self._unreadable}
        left_bytes, allowed_bytes = sum(each.stat.size_bytes for each in left), self._allowed_bytes()
        for each in left:
            age_s = now_s - each.stat.mtime_ns / NS_PER_S
            is_over = allowed_bytes is not None and left_bytes > allowed_bytes
            if each.may_go and (is_over or age_s >= self._timings.quarantine_age_s):
                check()
                done["quarantine"] += self._root.remove(each.name)
                left_bytes -= each.stat.size_bytes

    def _looked_at(self, done: Counter[str], check: Callable[[], object]) -> list[_Damaged]:
        """Puts whole files back; returns the others."""
        left: list[_Damaged] = []
        unreadable: set[Name] = set()
        for entry in list(self._root.list(places.QUARANTINE)):
            name = Name(f"{places.QUARANTINE}/{entry.name}")
            if entry.stat is None or not _is_set_aside(entry.name):
                continue
            check()
            may_go = True
            if name not in self._damaged:
                try:
                    verdict = self._inspector.look(name)
                    if isinstance(verdict, Whole):
                        self._put_back(name, verdict.header)
                        done["restored"] += 1
                    if not isinstance(verdict, Broken):
                        continue
                except (Unavailable, PermissionDenied):
                    # Either the file cannot be read, or the root fails for a moment: a second round tells.
                    may_go = name in self._unreadable
                    unreadable.add(name)
            left.append(_Damaged(name, entry.stat, may_go))
        self._unreadable = set(sorted(unreadable)[:REMEMBERED_MAX])
        return left

    def _put_back(self, name: Name, header: Header) -> None:
        """Publishes a whole file where it belongs, unless that name is taken."""
        namespace = NamespaceId(header.namespace[: places.NAMESPACE_ID_BYTES])
        self._root.publish(name, places.chunk(header.address, namespace, self._shard_bits), durable=False)

    def _allowed_bytes(self) -> float | None:
        """The bytes that damaged files may take; None if the capacity is unknown. Raises the root's errors."""
        accounts = self._accounts
        level = None if accounts is None else accounts.level or _level_before_scan(self._root, accounts)
        if level is None:
            return None
        return 0.0 if level.excess_bytes else self._timings.quarantine_share * level.capacity_bytes


def _level_before_scan(root: Root, accounts: Accounts) -> Level | None:
    """The level of the root as its file system says; None if it does not say. Raises the root's errors."""
    space, limit_bytes = root.space(), accounts.limit_bytes
    if space.total_bytes is None or space.free_bytes is None:
        return None if limit_bytes is None else _level(0, limit_bytes)
    disk = _level(space.total_bytes - space.free_bytes, space.total_bytes)
    if limit_bytes is None or limit_bytes >= space.total_bytes:
        return disk
    # The chunks are not listed yet, so only the file system can tell that there is no space.
    return _level(limit_bytes if disk.excess_bytes else 0, limit_bytes)


def _level(used_bytes: int, capacity_bytes: int) -> Level:
    return Level(used_bytes, capacity_bytes, int(HEADROOM_SHARE * capacity_bytes))


def _is_set_aside(file_name: str) -> bool:
    """True if ``places.quarantined`` makes such a name. People put other files there."""
    address, dot, rest = file_name.partition(".")
    session, other_dot, number = rest.partition(".")
    return bool(dot and other_dot and parse_id(address) and parse_id(session) and number.isdecimal())
