"""Walks a root folder by folder, names what is wrong, and repairs it if asked to, while nodes use the root.

Streaming: memory does not grow with the root.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections import Counter
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b

from kvstore.core.address import Address
from kvstore.core.clock import Clock, RandomIds, SystemClock
from kvstore.core.namespace import Namespace, NamespaceId
from kvstore.core.recency import NS_PER_S, was_never_stamped
from kvstore.core.validate import parse_json
from kvstore.errors import InvalidRequest, KVStoreError, RootMismatch
from kvstore.format import places
from kvstore.format.header import Damage, Header
from kvstore.format.places import Name
from kvstore.meta.keys import parse_id
from kvstore.root.fences import remove_tree
from kvstore.root.identity import (
    FILE_SYSTEMS_OWN,
    NAMESPACE_BYTES_MAX,
    SCRATCH_FOLDER,
    TOP,
    RootIdentity,
    claim_key,
    claimed_layout,
    read_small,
)
from kvstore.root.inspect import Inspector
from kvstore.root.interface import FolderEntry, Root

FINDINGS_MAX = 10_000


class FindingKind(enum.Enum):
    """The kind of a finding."""

    DAMAGED = "damaged"
    """A chunk file whose bytes are not what its header and format demand; the detail is the reason."""
    MISPLACED = "misplaced"
    """A whole chunk under another chunk's name (swapped files, another namespace's)."""
    WRONG_SHARD = "wrong_shard"
    """A whole chunk under its own name in another shard's folder, where no node looks."""
    FOREIGN = "foreign"
    """Something that this store did not write. Never touched."""
    ORPHAN_STAGING = "orphan_staging"
    """A file that a dead session staged and never published."""
    QUARANTINED = "quarantined"
    """A file that was set aside; the detail says what is wrong with it, or that it is whole."""
    BAD_RECORD = "bad_record"
    """A namespace's record or claim that cannot be read."""
    NO_RECORD = "no_record"
    """Chunks of a namespace that no record describes: only a node that is given the namespace can use them."""
    UNREADABLE = "unreadable"
    """The root refused to show it: an I/O error, or no permission."""
    LEFTOVER = "leftover"
    """The scratch folder of a ``check-root`` that was killed."""


LEFTOVERS = frozenset(
    {
        FindingKind.ORPHAN_STAGING,
        FindingKind.QUARANTINED,
        FindingKind.NO_RECORD,
        FindingKind.LEFTOVER,
    }
)
"""Findings of a sound root, which collectors, ``--repair`` or the next use tidy; they do not make a check fail."""


class Action(enum.Enum):
    """The action that repair took on a finding."""

    QUARANTINED = "quarantined"
    """Set aside, so that the next put writes it again."""
    RESTORED = "restored"
    """Put back at its right name."""
    REMOVED = "removed"
    """Deleted: staged by a dead session, verified as damaged in quarantine, or a whole copy is at the right name."""
    VANISHED = "vanished"
    """Gone, or sound, when repairing looked again: another node was faster."""
    FAILED = "failed"
    """The root did not let us; the detail says why."""


REPAIRED = frozenset({Action.QUARANTINED, Action.RESTORED, Action.REMOVED})
"""Actions after which a problem is gone."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found. ``name`` is relative to the root; ``action`` is None if nothing was to be done."""

    kind: FindingKind
    name: Name
    detail: str = ""
    action: Action | None = None

    @property
    def is_leftover(self) -> bool:
        """True if a sound root may have it."""
        return self.kind in LEFTOVERS

    @property
    def is_problem(self) -> bool:
        """True if it is damage, and was not gone when repair looked again."""
        return not self.is_leftover and self.action is not Action.VANISHED


@dataclass(slots=True)
class FsckReport:
    """The whole outcome; the counts are of all findings.

    ``findings`` keeps the first ``findings_max`` that are leftovers, and as many that are not.
    """

    findings_max: int = FINDINGS_MAX
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[FindingKind] = field(default_factory=Counter)
    actions: Counter[Action] = field(default_factory=Counter)
    problems_count: int = 0
    leftovers_count: int = 0
    repaired_count: int = 0
    chunks_count: int = 0
    chunks_bytes: int = 0
    read_bytes: int = 0
    namespaces_count: int = 0

    @property
    def is_clean(self) -> bool:
        """True if nothing was wrong (leftovers apart): exit code 0 of ``kvstore fsck``, else 1."""
        return self.problems_count == 0

    @property
    def unrepaired_count(self) -> int:
        return self.problems_count - self.repaired_count

    @property
    def is_truncated(self) -> bool:
        """True if there were more findings than ``findings`` keeps."""
        return self.counts.total() > len(self.findings)

    def add(self, finding: Finding) -> None:
        """Counts a finding, and keeps it while there is room."""
        self.counts[finding.kind] += 1
        self.problems_count += finding.is_problem
        self.leftovers_count += finding.is_leftover
        self.repaired_count += finding.is_problem and finding.action in REPAIRED
        if finding.action is not None:
            self.actions[finding.action] += 1
        others_count = self.counts.total() - self.leftovers_count
        if (self.leftovers_count if finding.is_leftover else others_count) <= self.findings_max:
            self.findings.append(finding)


STAGING_AGE_S = 3600.0
STAGING_GRACE_S = 120.0
"""A session may have begun after the list of live ones was read; its staged files are younger than this."""

_FILES = frozenset({places.FORMAT, places.RESERVE, places.BOUND})


@dataclass(frozen=True, slots=True)
class Options:
    """The choices of a check."""

    repair: bool = False
    verify_payload: bool = True
    """Read all bytes, otherwise only headers."""
    live_sessions: Set[bytes] | None = None
    """Ids of the sessions that live; None: unknown."""
    staging_age_s: float = STAGING_AGE_S
    """If ``live_sessions`` is None, files that were staged longer ago count as left by a dead session."""
    bytes_per_s: float | None = None
    """The limit of reading."""
    findings_max: int = FINDINGS_MAX


def fsck(
    root: Root,
    identity: RootIdentity,
    options: Options | None = None,
    *,
    found: Callable[[Finding], object] = lambda finding: None,
    progress: Callable[[int], object] = lambda shards_done: None,
    clock: Clock | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> FsckReport:
    """Checks every file of a root, while nodes use it.

    ``found`` is called with each finding, ``progress`` after each file. If a folder cannot be read, that is one
    finding. Raises the root's errors if the top cannot be read.
    """
    options, clock = options or Options(), clock or SystemClock()
    inspector = Inspector(
        root,
        verify_payload=options.verify_payload,
        bytes_per_s=options.bytes_per_s,
        monotonic_s=clock.monotonic_s,
        pause=pause,
    )
    repairer = Repairer(root, identity.shard_bits, inspector, RandomIds().fresh())
    report = FsckReport(options.findings_max)
    walk = _Walk(report, root, options, inspector, repairer, clock, clock.now_s(), found, progress)
    walk.top()
    walk.namespaces()
    walk.chunks()
    walk.staging()
    walk.quarantine()
    report.read_bytes = inspector.read_bytes
    return report


@dataclass(slots=True)
class _Walk:
    """One check of one root; a method per folder."""

    report: FsckReport
    root: Root
    options: Options
    inspector: Inspector
    repairer: Repairer
    clock: Clock
    began_s: float
    found: Callable[[Finding], object]
    progress: Callable[[int], object]
    recorded: set[NamespaceId] = field(default_factory=set)
    undescribed: set[NamespaceId] = field(default_factory=set)
    shards_done: int = 0

    def top(self) -> None:
        """Checks the root's own folder, the only one that must be readable."""
        for entry in list(self.root.list(TOP)):
            name = Name(entry.name)
            if entry.name in _FILES or entry.name in FILE_SYSTEMS_OWN:
                continue
            if entry.stat is None and SCRATCH_FOLDER.fullmatch(entry.name):
                self._add(FindingKind.LEFTOVER, name, "", partial(self.repairer.remove_tree, name))
            elif entry.stat is not None or entry.name not in places.FOLDERS:
                self._add(FindingKind.FOREIGN, name)

    def namespaces(self) -> None:
        """Every record and claim must be readable."""
        for entry in self._entries(places.NAMESPACES):
            name = Name(f"{places.NAMESPACES}/{entry.name}")
            stem, _, suffix = entry.name.rpartition(".")
            if entry.stat is None or suffix not in ("json", "claim") or not _is_hex(stem):
                self._add(FindingKind.FOREIGN, name)
                continue
            try:
                if suffix == "claim":
                    check_claim(self.root, name)
                elif (namespace := read_record(self.root, name)) is not None:
                    self.recorded.add(namespace.id)
            except (InvalidRequest, RootMismatch) as wrong:
                # Taken away, the next node that opens the namespace writes it again; the digest guards what it says.
                self._add(FindingKind.BAD_RECORD, name, str(wrong), partial(self.repairer.set_aside, name))
            except KVStoreError as error:
                self._add(FindingKind.UNREADABLE, name, str(error))
        self.report.namespaces_count = len(self.recorded)

    def chunks(self) -> None:
        """Every chunk must be whole, and where its address says."""
        for folder in self._entries(places.CHUNKS):
            name = Name(f"{places.CHUNKS}/{folder.name}")
            if folder.stat is not None or len(folder.name) != 4 or not _is_hex(folder.name):
                self._add(FindingKind.FOREIGN, name)
                continue
            for entry in self._entries(name):
                self._chunk(Name(f"{name}/{entry.name}"), entry)
            self.shards_done += 1
            self.progress(self.shards_done)

    def staging(self) -> None:
        """Finds what dead sessions left: staged files, and their folders."""
        live = self.options.live_sessions
        for folder in self._entries(places.STAGING):
            name = Name(f"{places.STAGING}/{folder.name}")
            session = parse_id(folder.name)
            if folder.stat is not None or session is None:
                self._add(FindingKind.FOREIGN, name)
                continue
            if live is not None and session in live:
                continue
            wanted_age_s = self.options.staging_age_s if live is None else STAGING_GRACE_S
            young = False
            for entry in self._entries(name):
                file = Name(f"{name}/{entry.name}")
                if entry.stat is None:
                    self._add(FindingKind.FOREIGN, file)
                    continue
                detail = f"{entry.stat.size_bytes} bytes"
                mtime_ns = entry.stat.mtime_ns
                is_old = self.began_s - mtime_ns / NS_PER_S >= wanted_age_s
                if is_old or was_never_stamped(mtime_ns, self.clock.now_s()):  # a check may take days
                    self._add(FindingKind.ORPHAN_STAGING, file, detail, partial(self.repairer.remove, file))
                else:
                    young = True  # perhaps a put in progress
            if self.options.repair and live is not None and not young:
                # An empty folder of a dead session is no finding. If it lives after all it makes the folder again.
                self.repairer.remove_folder(name)

    def quarantine(self) -> None:
        """Lists quarantined files. Repair puts whole ones back and deletes damaged ones."""
        for entry in self._entries(places.QUARANTINE):
            name = Name(f"{places.QUARANTINE}/{entry.name}")
            if entry.stat is None or not places.is_quarantined(entry.name):
                self._add(FindingKind.FOREIGN, name)
                continue
            try:
                verdict = self.inspector.look(name, thorough=True)
            except KVStoreError as error:
                self._add(FindingKind.UNREADABLE, name, str(error))
                continue
            if verdict is not None:
                detail = verdict.value if isinstance(verdict, Damage) else "whole"
                self._add(FindingKind.QUARANTINED, name, detail, partial(self.repairer.settle, name))
            self.progress(self.shards_done)

    def _chunk(self, name: Name, entry: FolderEntry) -> None:
        parsed = places.parse_chunk(entry.name)
        if entry.stat is None or parsed is None:
            self._add(FindingKind.FOREIGN, name)
            return
        try:
            verdict = self.inspector.look(name)
        except KVStoreError as error:
            self._add(FindingKind.UNREADABLE, name, str(error))
            return
        self.progress(self.shards_done)
        if verdict is None:
            return  # removed since it was listed
        if isinstance(verdict, Damage):
            self._add(FindingKind.DAMAGED, name, verdict.value, partial(self.repairer.take, name))
            return
        right = self.repairer.right_name(verdict)
        if right != name:
            own_name = (verdict.address, NamespaceId(verdict.namespace[:8])) == parsed
            kind = FindingKind.WRONG_SHARD if own_name else FindingKind.MISPLACED
            self._add(kind, name, f"belongs at {right}", partial(self.repairer.take, name))
            return
        self.report.chunks_count += 1
        self.report.chunks_bytes += verdict.file_bytes
        if parsed[1] not in self.recorded and parsed[1] not in self.undescribed:
            self.undescribed.add(parsed[1])
            self._add(FindingKind.NO_RECORD, name, f"namespace {verdict.namespace.hex()} has no record")

    def _entries(self, folder: Name) -> list[FolderEntry]:
        """Lists a folder completely before any entry is acted upon: repairing changes the folder."""
        try:
            return list(self.root.list(folder))
        except KVStoreError as error:
            self._add(FindingKind.UNREADABLE, folder, str(error))
            return []

    def _add(self, kind: FindingKind, name: Name, detail: str = "", act: Callable[[], Outcome] | None = None) -> None:
        finding = Finding(kind, name, detail)
        if self.options.repair and act is not None:
            try:
                action, said = act()
            except KVStoreError as error:
                action, said = Action.FAILED, str(error)
            finding = replace(finding, action=action, detail="; ".join(part for part in (detail, said) if part))
        self.report.add(finding)
        self.found(finding)


def read_record(root: Root, name: Name) -> Namespace | None:
    """Returns a namespace's record; None if it was removed. Raises InvalidRequest if it is wrong, the root's errors."""
    raw = read_small(root, name, NAMESPACE_BYTES_MAX)
    if raw is None:
        return None
    namespace = Namespace.from_json(raw)
    if name != places.namespace_record(namespace.digest):
        raise InvalidRequest(f"describes namespace {namespace.digest.hex()}")
    return namespace


def check_claim(root: Root, name: Name) -> None:
    """Raises InvalidRequest or RootMismatch for a claim that is wrong, and the root's errors."""
    raw = read_small(root, name, NAMESPACE_BYTES_MAX)
    if raw is None:
        return
    claimed_layout(raw, name)
    fields = parse_json(raw)
    tenant, namespace = fields.get("tenant"), fields.get("name")
    if name != places.namespace_claim(claim_key(tenant, namespace)):
        raise InvalidRequest(f"claims {namespace!r} of tenant {tenant!r}")


# Repair: take, look, put.
#
# A look at a file may be old when we act: a node may have quarantined it and put a good one at its name. So a file is
# first *taken*: renamed to a quarantine name that no other process uses. There it cannot change any more. If it is
# whole and was at its right name, it goes back; a good file that was taken by mistake is missing for that moment, which
# is a miss.
#
# At the end of the check we look at all that is in quarantine once more, put back what is whole, and delete what is
# damaged still. So a file is read at its name, after it was taken, and at the end before it is deleted, twice each
# time, and one whole reading of it brings it back: a device that delivers wrong bytes for a moment costs nothing. Files
# in each other's places are all in quarantine by then, so that none is in the way of another.


Outcome = tuple[Action, str]
"""The action taken, and a detail for the report."""


class Repairer:
    """Repairs one root under the name of ``session``, an id that no other process has. Raises the root's errors."""

    def __init__(self, root: Root, shard_bits: int, inspector: Inspector, session: bytes) -> None:
        self._root = root
        self._shard_bits = shard_bits
        self._inspector = inspector
        self._session = session
        self._numbers = itertools.count()

    def right_name(self, header: Header) -> Name:
        return places.chunk(header.address, NamespaceId(header.namespace[:8]), self._shard_bits)

    def take(self, name: Name) -> Outcome:
        """Quarantines a chunk file, unless it turns out to be whole and in its place."""
        aside = self._aside(name)
        if not self._root.move(name, aside):
            return Action.VANISHED, "gone when it was looked at again"
        verdict = self._inspector.look(aside, thorough=True)
        if verdict is None or isinstance(verdict, Damage) or self.right_name(verdict) != name:
            return Action.QUARANTINED, ""
        self._root.publish(aside, name, durable=False)
        return Action.VANISHED, "sound when it was looked at again"

    def settle(self, name: Name) -> Outcome:
        """Decides about a file in quarantine: a whole one goes back, a damaged one is deleted."""
        verdict = self._inspector.look(name, thorough=True)
        if verdict is None:
            return Action.VANISHED, "another check was faster"
        if isinstance(verdict, Damage):
            removed = self._root.remove(name)
            return (Action.REMOVED, f"damaged ({verdict.value})") if removed else (Action.VANISHED, "")
        right = self.right_name(verdict)
        occupant = self._inspector.look(right, thorough=True)
        if isinstance(occupant, Damage) or (occupant is not None and self.right_name(occupant) != right):
            # Publishing would find the name taken, and delete what may be the only copy.
            return Action.QUARANTINED, f"{right} is taken by another file"
        won = self._root.publish(name, right, durable=False)
        return (Action.RESTORED, f"as {right}") if won else (Action.REMOVED, f"{right} has a whole copy")

    def set_aside(self, name: Name) -> Outcome:
        """Takes a small file (a record) away, for the next writer to write it anew; the end of the check deletes it."""
        taken = self._root.move(name, self._aside(name))
        return (Action.QUARANTINED, "") if taken else (Action.VANISHED, "")

    def remove(self, name: Name) -> Outcome:
        """Deletes a file that no process will ever publish."""
        return (Action.REMOVED, "") if self._root.remove(name) else (Action.VANISHED, "")

    def remove_tree(self, folder: Name) -> Outcome:
        """Deletes a scratch folder of ours with all that is in it."""
        return (Action.REMOVED, "") if remove_tree(self._root, folder) else (Action.FAILED, "it is not empty")

    def remove_folder(self, name: Name) -> None:
        """Deletes a folder if it is empty and we may."""
        with suppress(KVStoreError):
            self._root.remove_folder(name)

    def _aside(self, name: Name) -> Name:
        last = name.rpartition("/")[2]
        found = places.parse_chunk(last)
        # Something else than a chunk's name has no address; a digest of the name keeps entries apart.
        key = found[0] if found else blake2b(last.encode("utf-8", "surrogateescape"), digest_size=16).digest()
        return places.quarantined(Address(key), self._session, next(self._numbers))


def _is_hex(text: str) -> bool:
    return bool(text) and all(digit in "0123456789abcdef" for digit in text)
