"""Leftovers: quarantined files, and what killed nodes and collectors left."""

from __future__ import annotations

import logging
from collections import Counter

from kvstore.core.namespace import NamespaceId
from kvstore.core.recency import NS_PER_S
from kvstore.errors import KVStoreError, Overloaded, PermissionDenied, RootMismatch, Unavailable
from kvstore.format import places
from kvstore.format.header import Damage, Header
from kvstore.format.places import Name
from kvstore.meta.keys import parse_id
from kvstore.meta.pins import StoredPin
from kvstore.meta.session import live_sessions
from kvstore.meta.sweeps import named_sweeps
from kvstore.root.fences import list_twins, read_twin
from kvstore.root.inspect import Inspector
from kvstore.root.interface import FolderEntry, Root
from kvstore_gc.capacity import Pressure
from kvstore_gc.rank import CountAndBytes
from kvstore_gc.site import Site

REMEMBERED_MAX = 100_000
"""Names of each kind remembered from round to round; those beyond it are looked at in every round."""


# Leftovers: files and folders other than chunks whose owner is gone.
#
# None of them can be held or pinned, so they need no grace, only certainty that the owner is gone. Each kind says
# which race it has to survive. ``Sweeper.lift_unnamed`` handles trash that no sweep names.
#
# Folders of shards stay, even empty ones: a publish that meets a folder on its way out makes it again only once.


log = logging.getLogger(__name__)

ORPHANS = ("staging", "restored", "quarantine", "plans", "twins", "failed")
"""The kinds that ``Orphans.remove`` counts."""


class Orphans:
    """The orphans of one root. One thread at a time. Remembers between rounds what it need not check again."""

    def __init__(self, site: Site, pressure: Pressure | None = None) -> None:
        """``pressure`` says when the quarantine must make room; None: never."""
        self._site = site
        self._root = site.root
        self._keys = site.keys
        self._meta = site.meta
        self._clock = site.clock
        self._timings = site.timings
        self._pressure = pressure
        self._inspector = Inspector(site.root, monotonic_s=site.clock.monotonic_s)
        self._damaged: set[Name] = set()
        """Files in quarantine that need not be read again."""
        self._ends_s: dict[Name, float] = {}

    def remove(self) -> Counter[str]:
        """Removes orphans, and counts them by kind: staging, restored, quarantine, plans, twins.

        If the root refuses one kind (no permission, an I/O error), the others and chunks are still collected: that is
        logged, and counted under ``failed``. Raises RootMismatch if a sweep's key cannot be understood, and Stopped.
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
                remove(now_s, done)
            except (Unavailable, PermissionDenied, Overloaded) as error:
                log.warning("gc.orphans_failed kind=%s %s", kind, error)
                done["failed"] += 1
        return done

    def _staging(self, now_s: float, done: Counter[str]) -> None:
        """Removes staged files, and their folders, of sessions that have ended.

        Folders first, sessions afterwards: a session puts its key before it stages (rule V1) and never comes back
        (rule W2). So if its folder was seen and its key is not there, it has ended, or there never was one. A node
        without a session stages as well, under an id of its own, which etcd never knew.

        Deleting a file too early harms no chunks: nothing of it is visible before it is published, and the put of a
        paused writer that wakes up finds its file deleted and fails. The age keeps that from happening to running puts.
        So does a put that finds its empty folder deleted.
        """
        folders = [entry.name for entry in self._root.list(places.STAGING) if entry.stat is None]
        live = live_sessions(self._meta, self._keys, self._timings.meta_timeout_s) if folders else set()
        for folder_name in folders:
            session = parse_id(folder_name)
            if session is None or session in live:
                continue
            folder = Name(f"{places.STAGING}/{folder_name}")
            files = list(self._root.list(folder))
            old = [each for each in files if _is_old(each, now_s, self._timings.staging_age_s)]
            for each in old:
                self._site.pause(0)
                done["staging"] += self._root.remove(Name(f"{folder}/{each.name}"))
            if len(old) == len(files):
                self._root.remove_folder(folder)

    def _plans(self, now_s: float, done: Counter[str]) -> None:
        """Removes plans of sweeps that have closed, or never began.

        Plans first, keys afterwards. A plan is written before its key is put: so it must also be old. A collector that
        was paused in between puts a key without a plan: the one that adopts it has nothing to delete, and closes it.
        """
        plans = list(self._root.list(places.PLANS))
        if not plans:
            return
        named = named_sweeps(self._meta, self._keys, self._timings.meta_timeout_s)
        for entry in plans:
            sweep, name = places.parse_plan(entry.name), Name(f"{places.PLANS}/{entry.name}")
            if entry.stat is None or sweep is None or sweep in named:
                continue
            if _is_old(entry, now_s, self._timings.plan_age_s):
                self._site.pause(0)
                done["plans"] += self._root.remove(name)

    def _quarantine(self, now_s: float, done: Counter[str]) -> None:
        """Puts whole files back; deletes damaged ones that are old, and all while chunks are evicted for the capacity.

        The node that set a file aside looks at it there and puts a whole one back itself. We do it if that node died in
        between, or at the same moment. Both publish, which never replaces: one of them finds the name taken or the
        source gone, and either is fine. If a newer chunk has the name, it stays, and ours is deleted.

        A file that cannot be read stays: it may be the root that fails. Age is that of the mtime, the last use of the
        chunk: nothing is written to a file when it is set aside.
        """
        is_pressed = self._pressure is not None and self._pressure.excess_bytes > 0
        damaged: set[Name] = set()
        for entry in list(self._root.list(places.QUARANTINE)):
            name = Name(f"{places.QUARANTINE}/{entry.name}")
            if entry.stat is None or not places.is_quarantined(entry.name):
                continue
            self._site.pause(0)
            if name not in self._damaged and not self._is_damaged(name, done):
                continue
            if is_pressed or now_s - entry.stat.mtime_ns / NS_PER_S >= self._timings.quarantine_age_s:
                done["quarantine"] += self._root.remove(name)
            elif len(damaged) < REMEMBERED_MAX:
                damaged.add(name)
        self._damaged = damaged

    def _is_damaged(self, name: Name, done: Counter[str]) -> bool:
        """Reads a file, and puts a whole one back where it belongs, unless that name is taken."""
        try:
            verdict = self._inspector.look(name)
        except (Unavailable, PermissionDenied):
            return False
        if isinstance(verdict, Header):
            namespace = NamespaceId(verdict.namespace[: places.NAMESPACE_ID_BYTES])
            right = places.chunk(verdict.address, namespace, self._site.identity.shard_bits)
            self._root.publish(name, right, durable=False)
            done["restored"] += 1
        return isinstance(verdict, Damage)

    def _twins(self, now_s: float, done: Counter[str]) -> None:
        """Removes twins of pins that ended by themselves: their owner died, their lease expired.

        Only long after the pin's end, and only without a key: no key can come any more then, because a pin is put
        under a lease that lasts no longer than its end says. The margin is for hosts whose clocks disagree.
        """
        ends_s: dict[Name, float] = {}
        for name in list(list_twins(self._root)):
            self._site.pause(0)
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

    def _twin(self, name: Name) -> StoredPin | None:
        """The record of a twin; None if it is gone, or damaged: sweeps then report it and reap nothing."""
        content = read_twin(self._root, name)
        if content is None:
            return None
        try:
            return StoredPin.from_bytes(content, name)
        except RootMismatch:
            return None

    def _has_key(self, record: StoredPin) -> bool:
        return self._meta.get(self._keys.ref(record.owner, record.id), self._timings.meta_timeout_s) is not None


def _is_old(entry: FolderEntry, now_s: float, age_s: float) -> bool:
    """True if the time of a file is so far from now: on NFS it is ahead until its writer has set it."""
    return entry.stat is not None and abs(now_s - entry.stat.mtime_ns / NS_PER_S) >= age_s


def other_files(root: Root) -> CountAndBytes:
    """Counts our files other than chunks: staged, in a sweep's trash, set aside. Raises the root's errors.

    Call it before the chunks are listed: a file published or put back in between then counts twice, and none is missed.
    """
    found = _files(root, places.QUARANTINE)
    for above in (places.STAGING, places.TRASH):
        for entry in list(root.list(above)):
            if entry.stat is None:
                found += _files(root, Name(f"{above}/{entry.name}"))
            else:
                found += CountAndBytes(1, entry.stat.size_bytes)
    return found


def _files(root: Root, folder: Name) -> CountAndBytes:
    """What cannot be listed counts as nothing: eviction must not end over what another account left."""
    try:
        sizes = [entry.stat.size_bytes for entry in root.list(folder) if entry.stat is not None]
    except KVStoreError as error:
        log.warning("leftovers.not_counted %s", error)
        return CountAndBytes(0, 0)
    return CountAndBytes(len(sizes), sum(sizes))
