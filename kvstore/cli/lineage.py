"""``kvstore ls --lineage``: who wrote what a root holds. Apart from the other lists, because it opens every file."""

from __future__ import annotations

import sys
import time

from kvstore.cli.access import Access
from kvstore.cli.output import print_json, print_table, progress_to, size
from kvstore.cli.rooted import open_existing
from kvstore.errors import InvalidRequest, KVStoreError, RootMismatch


def list_writers(access: Access, as_json: bool) -> None:
    """Prints what each writer has. Raises InvalidRequest without a root, and the root's errors."""
    from kvstore.census.walk import walk
    from kvstore.census.writers import by_writer
    from kvstore.node.namespaces import read_namespaces
    from kvstore.root.identity import read_identity
    from kvstore.root.lineages import read_writers

    if access.root is None:
        raise InvalidRequest("who wrote a chunk is in its file: give --root URL (one prompt's: kvstore lookup)")
    troubles: list[KVStoreError] = []
    root = open_existing(access.root, access.root_options)
    try:
        identity = read_identity(root)
        if identity is None:
            raise RootMismatch(f"{root.url} is not a kvstore root: it has no FORMAT file. Is the file system mounted?")
        names = {each.id: each.name for each in read_namespaces(root)}
        with progress_to("reading headers, shards") as show:
            found = walk(root, identity.shard_bits, headers=True, trouble=troubles.append, shard_done=show)
            shares = by_writer(found, read_writers(root))
    finally:
        root.close()
    if as_json:
        print_json(
            {
                "writers": [
                    {
                        "session": each.writer.session if each.writer else None,
                        "node": each.writer.node if each.writer else None,
                        "host": each.writer.host if each.writer else None,
                        "pid": each.writer.pid if each.writer else None,
                        "version": each.writer.version if each.writer else None,
                        "label": each.writer.label if each.writer else None,
                        "identity": each.writer.identity if each.writer else None,
                        "first_written_s": each.first_s or None,
                        "last_written_s": each.last_s or None,
                        "chunks": each.chunks_count,
                        "bytes": each.size_bytes,
                        "namespaces": sorted({names.get(id, id.hex()) for id in each.namespaces}),
                    }
                    for each in shares
                ],
                "unreadable": len(troubles),
            }
        )
    else:
        print_table(
            ("session", "label", "version", "host", "pid", "first written", "last written", "chunks", "stored", "of"),
            [
                (
                    *(
                        (each.writer.session, each.writer.label or "-", each.writer.version, each.writer.host)
                        if each.writer
                        else ("(no record)", "-", "-", "-")
                    ),
                    each.writer.pid if each.writer else "-",
                    _when(each.first_s),
                    _when(each.last_s),
                    each.chunks_count,
                    size(each.size_bytes),
                    ", ".join(sorted({names.get(id, id.hex()) for id in each.namespaces})),
                )
                for each in shares
            ],
        )
    if troubles:
        print(f"{len(troubles)} files or folders could not be read; the first: {troubles[0]}", file=sys.stderr)


def _when(moment_s: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment_s)) if moment_s else "-"
