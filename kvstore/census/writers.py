"""The chunks that each writer has on a root, told apart by their lineage.

Pure: what was found comes in, sums go out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.census.walk import Found
from kvstore.format.lineage import LineageId, Writer, Writers, written
from kvstore.namespace import NamespaceId


@dataclass(slots=True)
class Share:
    """The chunks of one writer; ``writer`` is None for all those together that have no record."""

    writer: Writer | None
    chunks_count: int = 0
    size_bytes: int = 0
    """Size of the files, headers included."""
    first_s: int = 0
    """The times of the oldest and the newest of these; 0 if unknown."""
    last_s: int = 0
    namespaces: set[NamespaceId] = field(default_factory=set)


def by_writer(found: Iterable[Found], writers: Writers) -> list[Share]:
    """The shares of all writers that have any, the latest first. ``found`` with headers; one without is of nobody."""
    shares: dict[LineageId | None, Share] = {}
    for each in found:
        said = None if each.header is None else written(each.header.incarnation)
        lineage = said.lineage if said is not None and said.lineage in writers else None
        share = shares.get(lineage)
        if share is None:
            share = shares[lineage] = Share(writers[lineage] if lineage is not None else None)
        share.chunks_count += 1
        share.size_bytes += each.size_bytes
        share.namespaces.add(each.namespace)
        if lineage is not None and said is not None:
            share.first_s = min(share.first_s or said.written_s, said.written_s)
            share.last_s = max(share.last_s, said.written_s)
    return sorted(shares.values(), key=lambda share: (-share.last_s, share.writer.session if share.writer else ""))
