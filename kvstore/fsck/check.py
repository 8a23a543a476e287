"""Walks a root folder by folder, names what is wrong, and repairs it if asked to.

Streaming: memory does not grow with the root, but for 32 bytes per chunk while looking for unreachable ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.address import ADDRESS_BYTES, NO_PARENT, Address
from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.format.header import Kind as HeaderKind
from kvstore.format.header import LineageId, written
from kvstore.format.places import Name
from kvstore.fsck.repair import Outcome, Repairer
from kvstore.fsck.report import FINDINGS_MAX, Finding, Kind, Progress, Records, Report
from kvstore.meta.keys import parse_id
from kvstore.namespace import NamespaceId
from kvstore.recency import NS_PER_S, was_never_stamped
from kvstore.root.identity import FILE_SYSTEMS_OWN, SCRATCH_FOLDER, TOP, RootIdentity, read_writer
from kvstore.root.inspect import Broken, Inspector
from kvstore.root.interface import Entry, Root
from kvstore.sources import Clock, Ids, RandomIds, SystemClock

# Finds chunks without a parent: 32 bytes of memory for each chunk, up to a limit.


class Reach:
    """Collects chunks while they are walked over; gives up, and frees what it has, beyond ``chunks_max``."""

    def __init__(self, chunks_max: int) -> None:
        self._chunks_max = chunks_max
        self._addresses: bytearray | None = bytearray()
        self._parents = bytearray()
        self._folders: list[tuple[int, str]] = []

    def add(self, name: Name, address: Address, parent: Address | None) -> None:
        """One chunk; ``parent`` is None for a block, which has none."""
        if self._addresses is None:
            return
        count = len(self._addresses) // ADDRESS_BYTES
        if count >= self._chunks_max:
            self._addresses, self._parents = None, bytearray()
            return
        self._addresses += address
        self._parents += NO_PARENT if parent is None else parent
        # A name is its folder, its address and its namespace: the folder and namespace repeat, so runs are kept.
        folder, _, last = name.rpartition("/")
        shape = f"{folder}/{{}}.{last.partition('.')[2]}"
        if not self._folders or self._folders[-1][1] != shape:
            self._folders.append((count, shape))

    def unreachable(self) -> list[tuple[Name, Address]] | None:
        """Name and parent of each chunk whose parent is not there; None beyond the limit."""
        if self._addresses is None:
            return None
        addresses, parents = _array(self._addresses), _array(self._parents)
        lost = np.flatnonzero(~np.isin(parents, addresses) & (parents != np.bytes_(NO_PARENT)))
        starts = [start for start, _ in self._folders]
        return [
            (
                Name(
                    self._folders[int(np.searchsorted(starts, index, side="right")) - 1][1].format(
                        self._at(self._addresses, int(index)).hex()
                    )
                ),
                self._at(self._parents, int(index)),
            )
            for index in lost
        ]

    @staticmethod
    def _at(packed: bytearray, index: int) -> Address:
        return Address(bytes(packed[index * ADDRESS_BYTES : (index + 1) * ADDRESS_BYTES]))


def _array(packed: bytearray) -> npt.NDArray[Any]:
    # numpy ignores zeros at the end of such items, which is harmless where all have the same length.
    return np.frombuffer(packed, dtype=f"S{ADDRESS_BYTES}") if packed else np.empty(0, dtype=f"S{ADDRESS_BYTES}")


STAGING_AGE_S = 3600.0
STAGING_GRACE_S = 120.0
"""A session may have begun after the list of live ones was read; its staged files are younger than this."""
REACH_MAX = 10_000_000
WRITER_AGE_S = 30 * 86_400.0
"""By this age, chunks that the root has lost are gone from every memory and local disk as well."""
LINEAGES_MAX = 1_000_000
"""The most writers that are told apart; beyond it no record counts as old."""

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
    reach_max: int = REACH_MAX
    """Chunks without their parent are looked for up to so many chunks (32 bytes of memory each)."""
    bytes_per_s: float | None = None
    """The limit of reading."""
    findings_max: int = FINDINGS_MAX


def fsck(
    root: Root,
    identity: RootIdentity,
    options: Options | None = None,
    *,
    found: Callable[[Finding], object] = lambda finding: None,
    progress: Callable[[Progress], object] = lambda progress: None,
    clock: Clock | None = None,
    ids: Ids | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> Report:
    """Checks every file of a root, beside nodes that use it.

    ``found`` is called with each finding, ``progress`` after each file. If a folder cannot be read, that is one
    finding. Raises the root's errors if the top cannot be read.
    """
    options, clock, ids = options or Options(), clock or SystemClock(), ids or RandomIds()
    inspector = Inspector(
        root,
        verify_payload=options.verify_payload,
        bytes_per_s=options.bytes_per_s,
        monotonic_s=clock.monotonic_s,
        pause=pause,
    )
    repairer = Repairer(root, identity.shard_bits, inspector, ids.fresh())
    walk = _Walk(root, options, inspector, repairer, clock.now_s(), found, progress, 1 << identity.shard_bits)
    walk.top()
    walk.namespaces()
    walk.chunks()
    walk.staging()
    walk.quarantine()
    walk.lineage()
    walk.reach()
    walk.report.read_bytes = inspector.read_bytes
    return walk.report


class _Walk:
    """One check of one root; a method per folder."""

    def __init__(
        self,
        root: Root,
        options: Options,
        inspector: Inspector,
        repairer: Repairer,
        now_s: float,
        found: Callable[[Finding], object],
        progress: Callable[[Progress], object],
        shards_count: int,
    ) -> None:
        self.report = Report(options.findings_max)
        self._root = root
        self._options = options
        self._inspector = inspector
        self._repairer = repairer
        self._now_s = now_s
        self._found = found
        self._progress = progress
        self._shards_count = shards_count
        self._reach = Reach(options.reach_max)
        self._records = Records(root)
        self._undescribed: set[NamespaceId] = set()
        self._lineages: set[LineageId] = set()
        self._files_count = 0
        self._shards_done = 0

    def top(self) -> None:
        """Checks the root's own folder, the only one that must be readable."""
        for entry in list(self._root.list(TOP)):
            name = Name(entry.name)
            if entry.name in _FILES or entry.name in FILE_SYSTEMS_OWN:
                continue
            if entry.stat is None and SCRATCH_FOLDER.fullmatch(entry.name):
                self._add(Kind.LEFTOVER, name, "", partial(self._repairer.remove_tree, name))
            elif entry.stat is not None or entry.name not in places.FOLDERS:
                self._add(Kind.FOREIGN, name)

    def namespaces(self) -> None:
        """Every record and claim must be readable."""
        for entry in self._entries(places.NAMESPACES):
            name = Name(f"{places.NAMESPACES}/{entry.name}")
            try:
                wrong = self._records.read(entry)
            except KVStoreError as error:
                self._add(Kind.UNREADABLE, name, str(error))
                continue
            if wrong is None:
                continue
            kind, detail = wrong
            if kind is Kind.FOREIGN:
                self._add(kind, name)
            else:
                # Taken away, the next node that opens the namespace writes it again; the digest guards what it says.
                self._add(kind, name, detail, partial(self._repairer.set_aside, name))
        self.report.namespaces_count = len(self._records.ids)

    def chunks(self) -> None:
        """Every chunk must be whole, and where its address says."""
        for folder in self._entries(places.CHUNKS):
            name = Name(f"{places.CHUNKS}/{folder.name}")
            if folder.stat is not None or not _is_shard(folder.name):
                self._add(Kind.FOREIGN, name)
                continue
            for entry in self._entries(name):
                self._chunk(Name(f"{name}/{entry.name}"), entry)
            self._shards_done += 1
            self._tell()

    def staging(self) -> None:
        """Finds what dead sessions left: staged files, and their folders."""
        live, now_s = self._options.live_sessions, self._now_s
        for folder in self._entries(places.STAGING):
            name = Name(f"{places.STAGING}/{folder.name}")
            session = parse_id(folder.name)
            if folder.stat is not None or session is None:
                self._add(Kind.FOREIGN, name)
                continue
            if live is not None and session in live:
                continue
            wanted_age_s = self._options.staging_age_s if live is None else STAGING_GRACE_S
            young = False
            for entry in self._entries(name):
                file = Name(f"{name}/{entry.name}")
                if entry.stat is None:
                    self._add(Kind.FOREIGN, file)
                    continue
                detail = f"{entry.stat.size_bytes} bytes"
                mtime_ns = entry.stat.mtime_ns
                is_old = now_s - mtime_ns / NS_PER_S >= wanted_age_s or was_never_stamped(mtime_ns, now_s)
                if is_old:
                    self._add(Kind.ORPHAN_STAGING, file, detail, partial(self._repairer.remove, file))
                else:
                    young = True
                    self._add(Kind.YOUNG_STAGING, file, detail)
            if self._options.repair and live is not None and not young:
                # An empty folder of a dead session is no finding. If it lives after all it makes the folder again.
                remove_folder_quietly(self._root, name)

    def quarantine(self) -> None:
        """Lists quarantined files. Repair puts whole ones back and deletes damaged ones."""
        for entry in self._entries(places.QUARANTINE):
            name = Name(f"{places.QUARANTINE}/{entry.name}")
            if entry.stat is None:
                self._add(Kind.FOREIGN, name)
                continue
            try:
                verdict = self._inspector.look(name, thorough=True)
            except KVStoreError as error:
                self._add(Kind.UNREADABLE, name, str(error))
                continue
            if verdict is not None:
                detail = verdict.damage.value if isinstance(verdict, Broken) else "whole"
                self._add(Kind.QUARANTINED, name, detail, partial(self._repairer.settle, name))
            self._tell()

    def lineage(self) -> None:
        """Every record of a writer must be readable. Repair removes old ones that no chunk names any more."""
        live = self._options.live_sessions
        for entry in self._entries(places.LINEAGE):
            name, session = Name(f"{places.LINEAGE}/{entry.name}"), places.parse_writer(entry.name)
            if entry.stat is None or session is None:
                self._add(Kind.FOREIGN, name)
                continue
            try:
                writer = read_writer(self._root, name)
            except KVStoreError as error:
                self._add(Kind.UNREADABLE, name, str(error))
                continue
            is_old = self._now_s - entry.stat.mtime_ns / NS_PER_S >= WRITER_AGE_S and session not in (live or ())
            if writer is None:
                self._add(Kind.BAD_RECORD, name, "", partial(self._repairer.remove, name))
            elif is_old and len(self._lineages) < LINEAGES_MAX and writer.lineage not in self._lineages:
                self._add(Kind.OLD_WRITER, name, writer.label or writer.host, partial(self._repairer.remove, name))

    def reach(self) -> None:
        """Finds chunks whose parent is not there."""
        lost = self._reach.unreachable()
        self.report.unreachable_count = None if lost is None else len(lost)
        for name, parent in lost or ():
            self._add(Kind.UNREACHABLE, name, f"its parent {parent.hex()} is not there")

    def _chunk(self, name: Name, entry: Entry) -> None:
        self._files_count += 1
        parsed = places.parse_chunk(entry.name)
        if entry.stat is None or parsed is None:
            self._add(Kind.FOREIGN, name)
            return
        try:
            verdict = self._inspector.look(name)
        except KVStoreError as error:
            self._add(Kind.UNREADABLE, name, str(error))
            return
        self._tell()
        if verdict is None:
            return  # removed since it was listed
        if isinstance(verdict, Broken):
            self._add(Kind.DAMAGED, name, verdict.damage.value, partial(self._repairer.take, name))
            return
        header = verdict.header
        right = self._repairer.right_name(header)
        if right != name:
            own_name = (header.address, NamespaceId(header.namespace[:8])) == parsed
            kind = Kind.WRONG_SHARD if own_name else Kind.MISPLACED
            self._add(kind, name, f"belongs at {right}", partial(self._repairer.take, name))
            return
        self.report.chunks_count += 1
        self.report.chunks_bytes += header.file_bytes
        said = written(header.incarnation)
        if said is not None and len(self._lineages) < LINEAGES_MAX:
            self._lineages.add(said.lineage)
        self._reach.add(name, header.address, header.parent if header.kind is HeaderKind.TOKENS else None)
        if parsed[1] not in self._records.ids and parsed[1] not in self._undescribed:
            self._undescribed.add(parsed[1])
            self._add(Kind.NO_RECORD, name, f"namespace {header.namespace.hex()} has no record")

    def _entries(self, folder: Name) -> list[Entry]:
        """Lists a folder completely before any entry is acted upon: repairing changes the folder."""
        try:
            return list(self._root.list(folder))
        except KVStoreError as error:
            self._add(Kind.UNREADABLE, folder, str(error))
            return []

    def _add(self, kind: Kind, name: Name, detail: str = "", act: Callable[[], Outcome] | None = None) -> None:
        finding = Finding(kind, name, detail)
        if self._options.repair and act is not None:
            action, said = act()
            finding = replace(finding, action=action, detail="; ".join(part for part in (detail, said) if part))
        self.report.add(finding)
        self._found(finding)

    def _tell(self) -> None:
        self._progress(
            Progress(
                self._shards_done,
                self._shards_count,
                self._files_count,
                self._inspector.read_bytes,
                self.report.problems_count,
            )
        )


def remove_folder_quietly(root: Root, name: Name) -> None:
    """Deletes a folder if it is empty and we may."""
    try:
        root.remove_folder(name)
    except KVStoreError:
        return


def _is_shard(name: str) -> bool:
    return len(name) == 4 and all(digit in "0123456789abcdef" for digit in name)
