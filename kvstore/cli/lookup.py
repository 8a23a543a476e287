"""``kvstore lookup``: where a stored prefix lies, chunk by chunk."""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.access import Access, access_options
from kvstore.cli.app import Command, check_failed
from kvstore.cli.options import json_option
from kvstore.cli.output import print_json, print_table
from kvstore.cli.selectors import Prompt, prompt_options
from kvstore.format.header import Encoding
from kvstore.text import size

if TYPE_CHECKING:
    from kvstore.results import ChunkPlace, RootCopy


@click.command(cls=Command, short_help="Where a stored prefix lies, chunk by chunk.")
@prompt_options
@click.option(
    "--chunks", "chunks_max", type=click.IntRange(0), default=0, help="Maximum number of leading chunks; 0: all."
)
@click.option("--worker", metavar="HOST:PORT", help="Ask this worker; by default the one that would serve the prompt.")
@access_options
@json_option
def lookup(prompt: Prompt, chunks_max: int, worker: str | None, access: Access, as_json: bool) -> None:
    """Show where each chunk of the longest stored prefix of a prompt is.

    Places are the root (with size, last use, encoding and writer), the memory and the local disk of a worker, and the
    memory of its peers. Also shows how many pins cover the chunk, and how many leading tokens each medium has, as
    POST /query of the worker and of kvstore events answers. Reads headers only, and does not count as a use. Exit
    code 1 if nothing is stored.

    \b
    Examples:
      kvstore lookup llama-3.1-8b 101,2023,2003 --connect 10.0.0.7:7070
      kvstore lookup llama-3.1-8b --tokens-file prompt.txt --etcd 10.0.0.5:2379 --json
    """
    ids = prompt.ids()
    with access.open_workers() as store:
        control = store.control
        cache = prompt.cache(store)
        found = control.lookup(cache, ids, chunks_max, worker)
        chunk_tokens = cache.layout.chunk_tokens
    if as_json:
        chunks = [_values(each, chunk_tokens) for each in found]
        head = {"namespace": prompt.name, "tokens": len(ids), "tokens_found": len(found) * chunk_tokens}
        print_json({**head, **_matched(found, chunk_tokens), "chunks": chunks})
    elif found:
        print_table(
            ("tokens", "address", "root", "used", "uses", "encoding", "written", "memory", "disk", "peers", "pins"),
            [_cells(each, chunk_tokens) for each in found],
        )
        media = _matched(found, chunk_tokens)["media"]
        click.echo("leading tokens: " + ", ".join(f"{name} {count}" for name, count in media.items()))
    else:
        click.echo("nothing of it is stored", err=True)
    if not found:
        check_failed()


def _matched(found: list[ChunkPlace], chunk_tokens: int) -> dict[str, Any]:
    """How long a prefix is stored, and how much of it each medium has, as ``POST /query`` answers it."""
    media = {
        "STORAGE": lambda place: place.root is not None and not place.root.is_condemned,
        "CPU": lambda place: place.memory is not None,
        "DISK": lambda place: place.on_disk,
    }
    leading = {name: len(list(takewhile(has, found))) * chunk_tokens for name, has in media.items()}
    return {
        "block_size": chunk_tokens,
        "blocks": len(found),
        "longest_matched": len(found) * chunk_tokens,
        "media": leading,
    }


def _cells(place: ChunkPlace, chunk_tokens: int) -> tuple[object, ...]:
    return (
        f"{place.index * chunk_tokens}-{(place.index + 1) * chunk_tokens}",
        place.address.hex()[:12],
        *_root_cells(place.root),
        "-" if place.memory is None else size(place.memory.size_bytes) + " dirty" * place.memory.is_dirty,
        "yes" if place.on_disk else "-",
        " ".join(place.peers) or "-",
        "?" if place.pins is None else place.pins,
    )


def _root_cells(copy: RootCopy | None) -> tuple[object, ...]:
    if copy is None:
        return ("-",) * 5
    by = copy.lineage
    return (
        size(copy.size_bytes) + " condemned" * copy.is_condemned,
        _ago(copy.last_use_s),
        "3+" if copy.uses == 3 else copy.uses,
        _encoding(copy),
        f"{_ago(by.written_s)} by {by.host} {by.label or by.version}" if by is not None else "-",
    )


def _values(place: ChunkPlace, chunk_tokens: int) -> dict[str, Any]:
    root, memory = place.root, place.memory
    return {
        "index": place.index,
        "first_token": place.index * chunk_tokens,
        "address": place.address.hex(),
        "root": None if root is None else _root_values(root),
        "memory": memory and {"bytes": memory.size_bytes, "dirty": memory.is_dirty, "users": memory.users_count},
        "disk": place.on_disk,
        "peers": [*place.peers],
        "pins": place.pins,
    }


def _root_values(copy: RootCopy) -> dict[str, Any]:
    return {
        "bytes": copy.size_bytes,
        "last_use_s": copy.last_use_s,
        "uses": copy.uses,
        "priority": copy.hints.priority,
        "ttl_s": copy.hints.ttl_s,
        "encoding": _encoding(copy),
        "key_id": copy.key_id.hex() or None,
        "condemned": copy.is_condemned,
        "lineage": copy.lineage and asdict(copy.lineage),
    }


def _encoding(copy: RootCopy) -> str:
    said = (("compressed", Encoding.COMPRESSED), ("encrypted", Encoding.ENCRYPTED))
    return "+".join(name for name, flag in said if flag in copy.encoding) or "plain"


def _ago(when_s: float) -> str:
    """A time ago in its largest unit; a last use is known to the minute."""
    seconds = max(0.0, time.time() - when_s)
    for each, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= each:
            return f"{seconds / each:.0f} {unit} ago"
    return "now"
