"""The chunks that a clear takes, as an operator selects them and as nodes carry it out.

An operator types a ``Selection``. It is resolved once, against the namespaces and writers that the root knows, to a
``ClearOrder``, which is absolute: every node understands the same by it, at any time.
Pure: no I/O, no clock.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

from kvstore.census.walk import ChunkFile
from kvstore.core.namespace import DIGEST_BYTES, Namespace, NamespaceDigest, NamespaceId
from kvstore.core.validate import brief, number, parse_json, shown
from kvstore.errors import InvalidRequest
from kvstore.format.header import LINEAGE_BYTES, SESSION_BYTES, Incarnation, LineageId, Writers, lineage_id, written

WRITER_FIELDS = ("node", "host", "version", "label")
IDS_MAX = 10_000
"""Writers, or namespaces, that one order may name: it is one value in etcd."""
ID_BYTES = 8
TEXT_BYTES_MAX = 4096
"""The limit of each text field: a worker keeps the texts of its operations, and lists a hundred of them."""
TIME_S_MAX = 253_402_300_800
"""The year 10000: no calendar goes further."""
AHEAD_S = 60
"""Seconds by which clocks of writers may be ahead of the clock that dates the order."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Every field that is given must hold of a chunk. Raises InvalidRequest if nothing is given, or no sense."""

    namespace: bytes | None = None
    """A namespace's digest."""
    tenant: str | None = None
    """All of a tenant; empty: those without one."""
    fingerprint: str = ""
    """All whose fingerprint begins so."""
    older_than_s: float = 0.0
    """Chunks that were not used for so long."""
    written_by: str = ""
    """A session (32 hexadecimal digits), or ``node=``, ``host=``, ``version=`` or ``label=`` with a value."""
    since_s: float = 0.0
    """Written at this time (seconds since the epoch) or later, by the writer's clock."""
    until_s: float = 0.0
    """Written before this time."""

    def __post_init__(self) -> None:
        if self.namespace is not None and not (
            isinstance(self.namespace, bytes) and len(self.namespace) == DIGEST_BYTES
        ):
            raise InvalidRequest(f"namespace={brief(self.namespace)}: expected its digest (cache.namespace.digest)")
        if self.tenant is not None:
            _check_text("tenant", self.tenant)
        for name in ("fingerprint", "written_by"):
            _check_text(name, getattr(self, name))
        for name in ("older_than_s", "since_s", "until_s"):
            object.__setattr__(self, name, _checked_seconds(name, getattr(self, name)))
        if self.until_s and self.since_s >= self.until_s:
            raise InvalidRequest(f"since {self.since_s:.0f} is not before until {self.until_s:.0f}: nothing is meant")
        if self.is_empty:
            raise InvalidRequest(
                "nothing is selected: give a namespace, tenant, fingerprint, age or writer (all of a root: remove it)"
            )
        _writer_test(self.written_by)

    @property
    def is_empty(self) -> bool:
        """True if nothing was given."""
        return all(getattr(self, each.name) == each.default for each in fields(self))

    def describe(self) -> str:
        """For people: what is meant, in the words of the command line."""
        said = [] if self.namespace is None else [f"namespace {self.namespace.hex()[:16]}"]
        said += [] if self.tenant is None else [f"tenant {self.tenant!r}"]
        said += [f"fingerprint {self.fingerprint}..."] if self.fingerprint else []
        said += [f"not used for {self.older_than_s:.0f} s"] if self.older_than_s else []
        said += [f"written by {self.written_by}"] if self.written_by else []
        said += [f"written at {_when(self.since_s)} or later"] if self.since_s else []
        said += [f"written before {_when(self.until_s)}"] if self.until_s else []
        return ", ".join(said)

    def resolve(self, namespaces: Iterable[Namespace], writers: Writers, now_s: float) -> ClearOrder:
        """Resolves it against all ``namespaces`` and ``writers`` of the root.

        Raises InvalidRequest if it selects no namespace or no writer, or too many.
        """
        found: frozenset[NamespaceId] | None = None
        if self.namespace is not None or self.tenant is not None or self.fingerprint:
            meant = [each for each in namespaces if self._means(each)]
            if not meant:
                raise InvalidRequest(
                    f"nothing matches: no namespace of this root is meant by {self.describe()} (kvstore ls lists them)"
                )
            found = frozenset(each.id for each in meant)
        lineages: frozenset[LineageId] | None = None
        if self.written_by:
            # Who else writes is for those who may clear what they wrote.
            lineages = _lineages(self.written_by, writers, lists=found is None)
        elif self.since_s or self.until_s:
            # What an unknown writer's incarnation says of a time means nothing: it may be random.
            lineages = frozenset(writers)
        for what, ids in (("namespaces", found), ("writers", lineages)):
            if ids is not None and len(ids) > IDS_MAX:
                raise InvalidRequest(f"{len(ids)} {what} are meant, over the limit of {IDS_MAX}: narrow it down")
        unused_since_s = now_s - self.older_than_s if self.older_than_s else 0.0
        return ClearOrder(found, lineages, self.since_s, self.until_s, unused_since_s, now_s)

    def _means(self, namespace: Namespace) -> bool:
        return (
            (self.namespace is None or namespace.digest == self.namespace)
            and (self.tenant is None or namespace.tenant == self.tenant)
            and namespace.fingerprint.startswith(self.fingerprint)
        )


@dataclass(frozen=True, slots=True)
class ClearOrder:
    """A clear. None and 0 mean: any."""

    namespaces: frozenset[NamespaceId] | None
    lineages: frozenset[LineageId] | None
    since_s: float
    until_s: float
    unused_since_s: float
    """Last used before this time."""
    ordered_s: float
    """The time of the order."""

    @property
    def needs_headers(self) -> bool:
        """True if the name and time of a file are not enough to decide."""
        return self.lineages is not None

    @property
    def stands(self) -> bool:
        """True if it is kept for nodes that are away. Its chunks must be distinguished from those written later."""
        return self.lineages is not None and not self.unused_since_s

    def takes(self, found: ChunkFile) -> bool:
        """True if it takes a file on the root. It takes none whose header is needed and missing."""
        last_use_s = float(found.recency.last_use_s)
        if self.lineages is None:
            return self.means(found.namespace) and self._is_unused(last_use_s)
        return found.header is not None and self.covers(found.namespace, found.header.incarnation, last_use_s)

    def covers(self, namespace: NamespaceDigest | NamespaceId, incarnation: Incarnation, last_use_s: float) -> bool:
        """True if it takes a chunk with these properties, wherever a copy is."""
        if not self.means(namespace) or not self._is_unused(last_use_s):
            return False
        if self.lineages is None:
            return True
        found = written(incarnation)
        return (
            found is not None
            and found.lineage in self.lineages
            and found.written_s + 1 > self.since_s  # it says in which second: what may be meant is
            and (not self.until_s or found.written_s < self.until_s)
        )

    def forbids(self, namespace: NamespaceDigest, incarnation: Incarnation, last_use_s: float) -> bool:
        """True if a copy in memory or on a disk must go: if it ``covers`` it, and it was not written after the order.

        So an order never affects what its writer, once fixed, writes later, however late a node receives the order.
        """
        found = written(incarnation)
        is_later = self.lineages is not None and (found is None or found.written_s > self.ordered_s + AHEAD_S)
        return not is_later and self.covers(namespace, incarnation, last_use_s)

    def means(self, namespace: NamespaceDigest | NamespaceId) -> bool:
        """True if it may take chunks of a namespace."""
        return self.namespaces is None or NamespaceId(namespace[:ID_BYTES]) in self.namespaces

    def to_json(self) -> bytes:
        """The order as nodes tell each other."""
        record = {
            "namespaces": _joined(self.namespaces),
            "lineages": _joined(self.lineages),
            "since_s": self.since_s,
            "until_s": self.until_s,
            "unused_since_s": self.unused_since_s,
            "ordered_s": self.ordered_s,
        }
        return json.dumps(record, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, content: bytes) -> ClearOrder:
        """The inverse. Raises InvalidRequest for anything else."""
        try:
            record = parse_json(content)
            namespaces, lineages = _split(record["namespaces"]), _split(record["lineages"])
            times = [float(record[name]) for name in ("since_s", "until_s", "unused_since_s", "ordered_s")]
            if not all(map(math.isfinite, times)):
                raise ValueError(f"times {times}")
            return cls(
                None if namespaces is None else frozenset(map(NamespaceId, namespaces)),
                None if lineages is None else frozenset(map(LineageId, lineages)),
                *times,
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as cause:
            raise InvalidRequest(f"not an order to clear: {cause}") from cause

    def _is_unused(self, last_use_s: float) -> bool:
        return not self.unused_since_s or last_use_s < self.unused_since_s


def checked_selection(value: object) -> Selection:
    """Returns ``value``, which is a selection. Raises InvalidRequest."""
    if not isinstance(value, Selection):
        raise InvalidRequest(
            f"selection={brief(value)}: expected kvstore.Selection, such as Selection(tenant=...); of one "
            "namespace, Selection(namespace=cache.namespace.digest)"
        )
    return value


def _checked_seconds(name: str, value: object) -> float:
    seconds = number(value)
    if seconds is None or not 0 <= seconds < TIME_S_MAX:
        raise InvalidRequest(
            f"{name}={brief(value)}: expected a number of seconds, at least 0 and before the year 10000"
        )
    return seconds


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(f"{name}={brief(text)}: expected text")
    try:
        size_bytes = len(text.encode())
    except UnicodeEncodeError as cause:
        raise InvalidRequest(f"{name} is not valid Unicode: {cause}") from cause
    if size_bytes > TEXT_BYTES_MAX:
        raise InvalidRequest(f"{name} has {size_bytes} bytes, over the limit of {TEXT_BYTES_MAX}")


def _writer_test(written_by: str) -> tuple[str, str]:
    """Parses a field of a writer and the value it must have. Raises InvalidRequest."""
    name, equals, value = written_by.partition("=")
    if not written_by:
        return "", ""
    if equals and name in WRITER_FIELDS and value:
        return name, value
    try:
        is_session = not equals and len(bytes.fromhex(name)) == SESSION_BYTES
    except ValueError:
        is_session = False
    if not is_session:
        listed = ", ".join(f"{each}=..." for each in WRITER_FIELDS)
        raise InvalidRequest(
            f"written by {brief(written_by)}: expected a session ({2 * SESSION_BYTES} hex digits), {listed}"
        )
    return "session", name.lower()


def _lineages(written_by: str, writers: Writers, *, lists: bool) -> frozenset[LineageId]:
    name, value = _writer_test(written_by)
    if name == "session":
        return frozenset({lineage_id(bytes.fromhex(value))})  # its record may be lost
    found = frozenset(lineage for lineage, writer in writers.items() if getattr(writer, name) == value)
    if not found and not lists:
        raise InvalidRequest(f"nothing matches: nothing was written by {written_by!r}")
    if not found:
        known = sorted({shown(str(getattr(writer, name))) for writer in writers.values()} - {""})
        listed = ", ".join(known[:10]) + (", ..." if len(known) > 10 else "")
        raise InvalidRequest(f"nothing matches: nothing was written by {written_by!r}; there are: {listed or 'none'}")
    return found


def _when(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s, UTC).isoformat(sep=" ", timespec="seconds")


def _joined(ids: Iterable[bytes] | None) -> str | None:
    return None if ids is None else b"".join(sorted(ids)).hex()


def _split(text: Any) -> list[bytes] | None:
    if text is None:
        return None
    packed = bytes.fromhex(text)
    if len(packed) % ID_BYTES:
        raise ValueError(f"ids of {len(packed)} bytes")
    return [packed[at : at + ID_BYTES] for at in range(0, len(packed), ID_BYTES)]


assert LINEAGE_BYTES == ID_BYTES


# The clear orders that are kept. A node consults them for each copy that it is about to keep.
#
# They keep cleared chunks from coming back into its memory or disk.


class ClearFilter:
    """Immutable. Without orders, asking costs nothing."""

    __slots__ = ("_by_lineage", "_others")

    def __init__(self, orders: Iterable[ClearOrder] = ()) -> None:
        self._by_lineage: dict[LineageId, list[ClearOrder]] = {}
        self._others: list[ClearOrder] = []
        for order in orders:
            if order.unused_since_s:
                continue  # what is read now is not unused any more
            if order.lineages is None:
                self._others.append(order)
            for lineage in order.lineages or ():
                self._by_lineage.setdefault(lineage, []).append(order)

    def __bool__(self) -> bool:
        return bool(self._by_lineage or self._others)

    def clears(self, namespace: NamespaceDigest) -> bool:
        """True if all of a namespace was cleared."""
        return any(order.means(namespace) for order in self._others)

    def forbids(self, namespace: NamespaceDigest, incarnation: Incarnation) -> bool:
        """True if a copy with this incarnation was cleared and must not be kept."""
        found = written(incarnation) if self._by_lineage else None
        orders = self._by_lineage.get(found.lineage, ()) if found is not None else ()
        return any(order.forbids(namespace, incarnation, 0.0) for order in (*orders, *self._others))


NOTHING = ClearFilter()
