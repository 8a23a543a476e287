"""The report of a check: findings, and the actions taken."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

from kvstore.errors import InvalidRequest
from kvstore.format import places
from kvstore.format.places import Name
from kvstore.layout import Layout
from kvstore.namespace import Namespace, NamespaceId
from kvstore.root.identity import read_small
from kvstore.root.interface import Entry, Root
from kvstore.root.namespaces import RECORD_BYTES_MAX, claim_key
from kvstore.text import parse_json

FINDINGS_MAX = 10_000


class Kind(enum.Enum):
    """The kind of a finding."""

    DAMAGED = "damaged"
    """A chunk file whose bytes are not what its header and format demand; the detail is the reason."""
    MISPLACED = "misplaced"
    """A whole chunk under another chunk's name (swapped files, another namespace's)."""
    WRONG_SHARD = "wrong_shard"
    """A whole chunk under its own name in another shard's folder, where nobody looks."""
    FOREIGN = "foreign"
    """Something that this store did not write. Never touched."""
    ORPHAN_STAGING = "orphan_staging"
    """A file that a dead session staged and never published."""
    YOUNG_STAGING = "young_staging"
    """Staged lately by a session that may live: perhaps a put in progress."""
    QUARANTINED = "quarantined"
    """A file that was set aside; the detail says what is wrong with it, or that it is whole."""
    BAD_RECORD = "bad_record"
    """A namespace's record or claim that cannot be read."""
    NO_RECORD = "no_record"
    """Chunks of a namespace that no record describes: only a node that is told the namespace can use them."""
    UNREACHABLE = "unreachable"
    """Chunks whose parent is not there; no match reaches them, garbage collection takes them in time."""
    UNREADABLE = "unreadable"
    """The root refused to show it: an I/O error, or no permission."""
    OLD_WRITER = "old_writer"
    """The record of a session that ended long ago, and that has no chunk on the root any more."""
    LEFTOVER = "leftover"
    """The scratch folder of a ``check-root`` that was killed."""


HOUSEKEEPING = frozenset(
    {
        Kind.ORPHAN_STAGING,
        Kind.YOUNG_STAGING,
        Kind.QUARANTINED,
        Kind.NO_RECORD,
        Kind.UNREACHABLE,
        Kind.OLD_WRITER,
        Kind.LEFTOVER,
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

    kind: Kind
    name: Name
    detail: str = ""
    action: Action | None = None

    @property
    def is_housekeeping(self) -> bool:
        """True if a sound root may have it."""
        return self.kind in HOUSEKEEPING

    @property
    def is_problem(self) -> bool:
        """True if it is damage, and was not gone when repair looked again."""
        return not self.is_housekeeping and self.action is not Action.VANISHED


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a check: shards of all shards, files and bytes read."""

    shards_done: int
    shards_total: int
    files_count: int
    read_bytes: int
    problems_count: int


@dataclass(slots=True)
class Report:
    """The whole outcome; the counts are of all findings.

    ``findings`` keeps the first ``findings_max`` that are housekeeping, and as many that are not.
    """

    findings_max: int = FINDINGS_MAX
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[Kind] = field(default_factory=Counter)
    actions: Counter[Action] = field(default_factory=Counter)
    problems_count: int = 0
    housekeeping_count: int = 0
    repaired_count: int = 0
    chunks_count: int = 0
    chunks_bytes: int = 0
    read_bytes: int = 0
    namespaces_count: int = 0
    unreachable_count: int | None = None
    """Chunks without their parent; None if not counted, or if the root has too many chunks."""

    @property
    def is_clean(self) -> bool:
        """True if nothing was wrong (housekeeping apart): exit code 0 of ``kvstore fsck``, else 1."""
        return self.problems_count == 0

    @property
    def unrepaired_count(self) -> int:
        """Problems that are still there."""
        return self.problems_count - self.repaired_count

    @property
    def is_truncated(self) -> bool:
        """True if there were more findings than ``findings`` keeps."""
        return self.counts.total() > len(self.findings)

    def add(self, finding: Finding) -> None:
        """Counts a finding, and keeps it while there is room."""
        self.counts[finding.kind] += 1
        self.problems_count += finding.is_problem
        self.housekeeping_count += finding.is_housekeeping
        self.repaired_count += finding.is_problem and finding.action in REPAIRED
        if finding.action is not None:
            self.actions[finding.action] += 1
        others_count = self.counts.total() - self.housekeeping_count
        if (self.housekeeping_count if finding.is_housekeeping else others_count) <= self.findings_max:
            self.findings.append(finding)


# The namespaces' records on a root: can they be read, and which namespaces do they describe?


Wrong = tuple[Kind, str]
"""The fault of a record."""


class Records:
    """Reads records one by one; ``ids`` are those of the namespaces that have a good one."""

    def __init__(self, root: Root) -> None:
        self.ids: set[NamespaceId] = set()
        self._root = root

    def read(self, entry: Entry) -> Wrong | None:
        """Reads one entry; returns its fault, or None if it has none or is gone. Raises the root's errors."""
        stem, dot, suffix = entry.name.rpartition(".")
        if entry.stat is None or not dot or suffix not in ("json", "claim") or not _is_hex(stem):
            return Kind.FOREIGN, ""
        raw = read_small(self._root, Name(f"{places.NAMESPACES}/{entry.name}"), RECORD_BYTES_MAX)
        if raw is None:
            return None
        try:
            if suffix == "json":
                namespace = Namespace.from_json(raw)
                if namespace.digest.hex() != stem:
                    return Kind.BAD_RECORD, f"describes namespace {namespace.digest.hex()}"
                self.ids.add(namespace.id)
            else:
                fields = parse_json(raw)
                Layout.from_dict(fields["layout"])
                if claim_key(fields["tenant"], fields["name"]).hex() != stem:
                    return Kind.BAD_RECORD, f"claims {fields['name']!r} of tenant {fields['tenant']!r}"
        except (InvalidRequest, ValueError, KeyError, TypeError) as cause:
            return Kind.BAD_RECORD, str(cause)
        return None


def read_claim(root: Root, key: bytes) -> Layout | None:
    """The layout that a claim on the root names; None if there is no readable one. Raises the root's errors."""
    raw = read_small(root, places.namespace_claim(key), RECORD_BYTES_MAX)
    if raw is None:
        return None
    try:
        return Layout.from_dict(parse_json(raw)["layout"])
    except (InvalidRequest, ValueError, KeyError, TypeError):
        return None


def _is_hex(text: str) -> bool:
    try:
        return bool(bytes.fromhex(text))
    except ValueError:
        return False
