"""The records of writers on a root: who wrote under each lineage. Written once, like ``FORMAT``; never changed.

Separate from chunks, which carry only 8 bytes of lineage: one record serves all chunks of a session.
"""

from __future__ import annotations

from kvstore.errors import InvalidRequest
from kvstore.format import places
from kvstore.format.lineage import RECORD_BYTES_MAX, LineageId, Writer
from kvstore.format.places import Name
from kvstore.root.identity import publish_small, read_small
from kvstore.root.interface import Root
from kvstore.sources import Clock, Ids


def publish_writer(root: Root, writer: Writer, *, ids: Ids, clock: Clock) -> None:
    """Publishes the record of a session, unless it is there. Synced. Raises the root's errors."""
    publish_small(root, places.writer(bytes.fromhex(writer.session)), writer.to_json(), ids=ids, clock=clock)


def read_writers(root: Root) -> dict[LineageId, Writer]:
    """Returns all writers that the root knows, except unreadable records. Raises the root's errors."""
    found: dict[LineageId, Writer] = {}
    for entry in root.list(places.LINEAGE):
        writer = read_writer(root, Name(f"{places.LINEAGE}/{entry.name}")) if entry.stat is not None else None
        if writer is not None:
            found[writer.lineage] = writer
    return found


def read_writer(root: Root, name: Name) -> Writer | None:
    """Returns the writer of a record; None if it is gone, damaged, or another session's. Raises the root's errors."""
    content = read_small(root, name, RECORD_BYTES_MAX)
    if content is None:
        return None
    try:
        writer = Writer.from_json(content)
    except InvalidRequest:
        return None
    return writer if places.writer(bytes.fromhex(writer.session)) == name else None
