"""The root, memory and etcd that a cluster needs: the formulas of SIZING.md.

    python3 deploy/sizing.py --nodes 8 --tokens-per-s 40000 --bytes-per-token 131072 --hits 0.5 --keep 7d

A program of its own, with nothing but the standard library, so that it can be run before anything is installed.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass

KiB, MiB, GiB, TiB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

# Measured; SIZING.md says how. tests/deploy/test_sizing.py compares them with what the code does.
HEADER_STEP_BYTES = 4096
ENTRY_BYTES = 370
PRINT_BYTES = 3
NODE_BYTES = 300
PIN_BYTES = 300
PINNED_CHUNK_BYTES = 16
COLLECTOR_BYTES = 130 * MiB
COLLECTOR_CHUNK_BYTES = 90
LISTED_PER_S = 129_000

# Limits and settings.
LOW = 0.8  # of the capacity in use: kvstore-gc keeps 5 % free, and up to 25 % while nodes write fast
PROCESS_BYTES = 3 * GiB  # calls in progress (1 GiB), puts behind, connections, the interpreter
DIGESTS_BYTES_PER_S_MAX = 4 * MiB  # of all nodes together (MEMORY.md, Peers)
DIGEST_BYTES_PER_S_MAX = 1 * MiB
COMPACTION_S = 300  # etcd keeps at least this much history, and up to twice as much
FEW_CHUNKS = 10_000_000  # for which --shard-bits 8 is right


@dataclass(frozen=True, slots=True)
class Load:
    """The demand on a cluster. ``tokens_per_s`` are prompt tokens of all engines, ``hits`` the share found."""

    nodes: int
    tokens_per_s: float
    bytes_per_token: int
    hits: float
    keep_s: float
    chunk_tokens: int = 256
    layers: int = 32
    memory_s: float = 600.0
    pins: int = 0
    pinned_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Need:
    """The needs of the cluster, or of each worker where a field says so."""

    root_bytes: float
    root_chunks: float
    root_written_bytes_per_s: float
    root_read_bytes_per_s: float
    worker_memory_bytes: float
    worker_ram_bytes: float
    collector_bytes: float
    round_s: float
    shard_bits: int
    etcd_bytes: float
    etcd_written_bytes_per_s: float


def chunk_file_bytes(chunk_tokens: int, bytes_per_token: int, layers: int) -> int:
    """Size of a chunk's file: header, tokens and a checksum per section in whole pages, then the payload."""
    header = 128 + 4 * chunk_tokens + 8 * 2 * layers + 8
    return math.ceil(header / HEADER_STEP_BYTES) * HEADER_STEP_BYTES + chunk_tokens * bytes_per_token


def need(load: Load) -> Need:
    """The formulas of SIZING.md."""
    file_bytes = chunk_file_bytes(load.chunk_tokens, load.bytes_per_token, load.layers)
    new_chunks_per_s = load.tokens_per_s * (1 - load.hits) / load.chunk_tokens
    root_bytes = new_chunks_per_s * file_bytes * load.keep_s / LOW
    root_chunks = root_bytes / file_bytes
    # Memory holds what was written or read in the last memory_s, on whichever worker it was.
    memory_chunks = load.tokens_per_s * load.memory_s / load.chunk_tokens / load.nodes
    worker_memory = memory_chunks * file_bytes
    index = memory_chunks * (ENTRY_BYTES + 4 * load.chunk_tokens)
    digest = memory_chunks * PRINT_BYTES
    digests_per_s = min(DIGESTS_BYTES_PER_S_MAX, load.nodes * min(DIGEST_BYTES_PER_S_MAX, digest))
    pinned_chunks = load.pinned_tokens / load.chunk_tokens
    live = load.nodes * (NODE_BYTES + digest) + load.pins * PIN_BYTES + pinned_chunks * PINNED_CHUNK_BYTES
    return Need(
        root_bytes=root_bytes,
        root_chunks=root_chunks,
        root_written_bytes_per_s=new_chunks_per_s * file_bytes,
        root_read_bytes_per_s=load.tokens_per_s * load.hits / load.chunk_tokens * file_bytes,
        worker_memory_bytes=worker_memory,
        worker_ram_bytes=worker_memory + index + PROCESS_BYTES,
        collector_bytes=COLLECTOR_BYTES + COLLECTOR_CHUNK_BYTES * root_chunks,
        round_s=root_chunks / LISTED_PER_S,
        shard_bits=8 if root_chunks <= FEW_CHUNKS else 12,
        etcd_bytes=2 * live + 2 * COMPACTION_S * digests_per_s,
        etcd_written_bytes_per_s=digests_per_s,
    )


def table(load: Load) -> list[tuple[str, str]]:
    """The table for people: a row for each need."""
    found = need(load)
    return [
        ("root", f"{_size(found.root_bytes)} in {found.root_chunks:,.0f} files"),
        ("root is written, at most", f"{_size(found.root_written_bytes_per_s)}/s"),
        ("root is read, without memory", f"{_size(found.root_read_bytes_per_s)}/s"),
        ("--memory of each worker", _size(found.worker_memory_bytes)),
        ("RAM of each worker", _size(found.worker_ram_bytes)),
        ("RAM of a collector", _size(found.collector_bytes)),
        ("a round of one collector", f"{found.round_s:,.0f} s at least"),
        ("--shard-bits", str(found.shard_bits)),
        ("etcd, on each member", _size(found.etcd_bytes)),
        ("etcd is written", f"{_size(found.etcd_written_bytes_per_s)}/s"),
    ]


def _size(count: float) -> str:
    for unit, name in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"


def _seconds(text: str) -> float:
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    return float(text[:-1]) * units[text[-1]] if text[-1] in units else float(text)


def main() -> None:
    """Prints the table for a load given as options."""
    parser = argparse.ArgumentParser(description="How much root, memory and etcd a cluster needs (SIZING.md).")
    parser.add_argument("--nodes", type=int, required=True, help="workers")
    parser.add_argument("--tokens-per-s", type=float, required=True, help="prompt tokens of all engines together")
    parser.add_argument("--bytes-per-token", type=int, required=True, help="KV of one token, all layers")
    parser.add_argument("--hits", type=float, default=0.5, help="share of prompt tokens that is found stored (0.5)")
    parser.add_argument("--keep", dest="keep_s", type=_seconds, default="7d", help="how long chunks shall stay (7d)")
    parser.add_argument("--memory-for", dest="memory_s", type=_seconds, default="10m", help="how long in memory (10m)")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--pins", type=int, default=0)
    parser.add_argument("--pinned-tokens", type=int, default=0, help="of all pins together")
    sys.stdout.writelines(f"{name:30}{value}\n" for name, value in table(Load(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
