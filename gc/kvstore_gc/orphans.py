"""What nobody will ever come back for: files and folders whose owner is gone, apart from chunks.

Separate from sweeps because none of it can be held or pinned: no grace is needed, only certainty that the owner is
gone.  Each kind says which race it has to survive.  Trash that no sweep names is ``Sweeper.lift_unnamed``'s.

Folders of shards stay, even empty ones: a publish that meets a folder on its way out makes it again only once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from kvstore.errors import Overloaded, PermissionDenied, RootMismatch, Unavailable
from kvstore.format import places
from kvstore.format.places import Name
from kvstore.meta.interface import Meta
from kvstore.meta.keys import Keys, parse_id
from kvstore.meta.pins import PinRecord
from kvstore.meta.sweeps import Condemned
from kvstore.namespace import NamespaceId
from kvstore.recency import NS_PER_S
from kvstore.root.identity import RootIdentity
from kvstore.root.inspect import Inspector, Whole
from kvstore.root.interface import Entry, Root
from kvstore.root.twins import list_twins, read_twin
from kvstore.sources import Clock
from kvstore_gc.safety import Timings

log = logging.getLogger(__name__)

REMEMBERED_MAX = 100_000
"""Names remembered from round to round, of each kind; what is beyond is looked at in every round."""


class Orphans:
    """The orphans of one root. One thread at a time. Remembers from round to round what it need not look at again."""

    def __init__(self, root: Root, identity: RootIdentity, meta: Meta, *, clock: Clock, timings: Timings) -> None:
        self._root = root
        self._shard_bits = identity.shard_bits
        self._keys = Keys(identity.root)
        self._meta = meta
        self._clock = clock
        self._timings = timings
        self._inspector = Inspector(root, monotonic_s=clock.monotonic_s)
        self._damaged: set[Name] = set()
        self._empty: set[Name] = set()
        self._ends_s: dict[Name, float] = {}

    def remove(self, check: Callable[[], object] = lambda: None) -> Counter[str]:
        """Removes what there is, counted by kind: staging, restored, quarantine, plans, twins.

        ``check`` is called before each file and may raise to end it.  A root that refuses one kind (no permission, an
        I/O error) is no reason to leave the others, or chunks, alone: that is logged, and counted under ``failed``.
        Raises RootMismatch where a sweep's key cannot be understood.
        """
        done: Counter[str] = Counter()
        now_s = self._clock.now_s()
        for kind, remove in (
            ("staging", self._staging),
            ("quarantine", self._quarantine),
            ("plans", self._plans),
            ("twins", self._twins),
        ):
            try:
                remove(now_s, done, check)
            except (Unavailable, PermissionDenied, Overloaded) as error:
                log.warning("gc.orphans_failed kind=%s %s", kind, error)
                done["failed"] += 1
        return done

    def _staging(self, now_s: float, done: Counter[str], check: Callable[[], object]) -> None:
        """Staged files, and their folders, of sessions that have ended.

        Folders first, sessions afterwards: a session puts its key before it stages (rule V1), so one whose folder was
        seen and whose key is not there has ended.  A node without a session stages too, under an id that etcd never
        knew, and a paused one may wake up: so a file must also be older than any put can last.  A put that goes on
        later still finds its file gone, and fails; nothing of it was visible to anybody.
        """
        folders = [entry.name for entry in self._root.list(places.STAGING) if entry.stat is None]
        if not folders:
            return
        sessions = self._meta.list(self._keys.sessions, self._timings.meta_timeout_s)
        live = {self._keys.parse_session(kv.key) for kv in sessions.items}
        empty: set[Name] = set()
        for session in folders:
            if parse_id(session) is None or parse_id(session) in live:
                continue
            folder = Name(f"{places.STAGING}/{session}")
            files = list(self._root.list(folder))
            old = [each for each in files if _is_old(each, now_s, self._timings.staging_age_s)]
            for each in old:
                check()
                done["staging"] += self._root.remove(Name(f"{folder}/{each.name}"))
            if len(old) < len(files):
                continue
            # An empty folder may have been made a moment ago, by somebody who is about to stage in it and would then
            # not find it. So it must have been empty in the round before, or have held what we have removed.
            if old or folder in self._empty:
                self._root.remove_folder(folder)
            else:
                empty.add(folder)
        self._empty = empty

    def _quarantine(self, now_s: float, done: Counter[str], check: Callable[[], object]) -> None:
        """Files that were set aside: whole ones go back to where they belong, damaged ones are deleted in time.

        Whoever set a file aside looks at it there and puts a whole one back itself; we come in where it died between,
        or look at the same moment.  Both publish, which never replaces: one of them finds the name taken or the source
        gone, and either is fine.  Where a newer chunk has the name it stays, and ours is deleted.

        Age is that of the mtime, the last use of the chunk: nothing is written to a file when it is set aside.
        """
        damaged: set[Name] = set()
        for entry in list(self._root.list(places.QUARANTINE)):
            name = Name(f"{places.QUARANTINE}/{entry.name}")
            if entry.stat is None or not _is_set_aside(entry.name):
                continue
            check()
            if name not in self._damaged and self._put_back(name):
                done["restored"] += 1
            elif _is_old(entry, now_s, self._timings.quarantine_age_s):
                done["quarantine"] += self._root.remove(name)
            elif len(damaged) < REMEMBERED_MAX:
                damaged.add(name)
        self._damaged = damaged

    def _put_back(self, name: Name) -> bool:
        """Whether a file in quarantine was whole, and so is back, unless its name was taken."""
        verdict = self._inspector.look(name)
        if not isinstance(verdict, Whole):
            return False
        header = verdict.header
        namespace = NamespaceId(header.namespace[: places.NAMESPACE_ID_BYTES])
        self._root.publish(name, places.chunk(header.address, namespace, self._shard_bits), durable=False)
        return True

    def _plans(self, now_s: float, done: Counter[str], check: Callable[[], object]) -> None:
        """Plans of sweeps that have closed, or never began.

        Plans first, keys afterwards.  A plan is written before its key is put: so it must also be old.  A collector
        that was paused for so long in between puts a key without a plan, and whoever adopts that one has nothing to
        delete, and closes it.
        """
        old = [entry for entry in self._root.list(places.PLANS) if _is_old(entry, now_s, self._timings.orphan_age_s)]
        if not old:
            return
        sweeps = self._meta.list(self._keys.condemned, self._timings.meta_timeout_s)
        named = {bytes(Condemned.from_bytes(kv.value).sweep) for kv in sweeps.items}
        for entry in old:
            sweep = places.parse_plan(entry.name)
            if sweep is not None and sweep not in named:
                check()
                done["plans"] += self._root.remove(Name(f"{places.PLANS}/{entry.name}"))

    def _twins(self, now_s: float, done: Counter[str], check: Callable[[], object]) -> None:
        """Twins of pins that ended without anybody to remove them: their owner died, their lease expired.

        Only long after the pin's end, and only without a key: none can come any more then, because a pin is put under
        a lease that lasts no longer than its end says.  The margin is for hosts whose clocks disagree.
        """
        ends_s: dict[Name, float] = {}
        for name in list(list_twins(self._root)):
            check()
            known_s = self._ends_s.get(name)
            if known_s is None or known_s + self._timings.twin_margin_s < now_s:
                record = self._twin(name)
                if record is None:
                    continue
                known_s = record.expires_s
                if known_s + self._timings.twin_margin_s < now_s and not self._has_key(record):
                    done["twins"] += self._root.remove(name)
                    continue
            if len(ends_s) < REMEMBERED_MAX:
                ends_s[name] = known_s
        self._ends_s = ends_s

    def _twin(self, name: Name) -> PinRecord | None:
        """What a twin says; None where it is gone, or damaged: sweeps say so, and reap nothing until it is settled."""
        content = read_twin(self._root, name)
        if content is None:
            return None
        try:
            return PinRecord.from_bytes(content, name)
        except RootMismatch:
            return None

    def _has_key(self, record: PinRecord) -> bool:
        return self._meta.get(self._keys.ref(record.owner, record.id), self._timings.meta_timeout_s) is not None


def _is_old(entry: Entry, now_s: float, age_s: float) -> bool:
    return entry.stat is not None and now_s - entry.stat.mtime_ns / NS_PER_S >= age_s


def _is_set_aside(file_name: str) -> bool:
    """Whether a name in quarantine is one that ``places.quarantined`` makes. Others were put there by people."""
    address, dot, rest = file_name.partition(".")
    session, other_dot, number = rest.partition(".")
    return bool(dot and other_dot and parse_id(address) and parse_id(session) and number.isdecimal())
