"""How much memory a cache in shared memory takes of its process: what its capacity says, in bytes.

Apart from the cache, because it depends on how chunks lie in memory and on how much there is of it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kvstore.format.header import PAGE_BYTES, header_bytes
from kvstore.layout import Layout
from kvstore.node.settings import MEMORY_BYTES_MIN

TOKEN_ID_BYTES = 4
SHARE_MAX = 1 / 4
"""Of what this process may have: a capacity that was only a number until now must not end it."""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_bytes(layout: Layout, capacity_tokens: int) -> int:
    """Memory for the chunks of so many tokens: at least 16 MiB, at most a quarter of what there is."""
    chunk_bytes = header_bytes(TOKEN_ID_BYTES * layout.chunk_tokens, layout.section_count) + layout.chunk_bytes
    chunks = -(-capacity_tokens // layout.chunk_tokens)
    wanted = min(chunks * _whole_pages(chunk_bytes), int(_bytes_there() * SHARE_MAX))
    return max(MEMORY_BYTES_MIN, _whole_pages(wanted))


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _bytes_there() -> int:
    """All memory of the host, or what the container is limited to."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no limit ("max"), or another system
        there = min(there, int(CGROUP_LIMIT.read_text()))
    return there
