"""The memory that a cache in shared memory takes of its process: its capacity in bytes.

Separate from the cache, because it depends on how chunks lie in memory and on how much memory there is.
"""

from __future__ import annotations

from kvstore.format.header import PAGE_BYTES, header_bytes
from kvstore.layout import Layout
from kvstore.memory.host import memory_there_bytes
from kvstore.node.settings import MEMORY_BYTES_MIN

TOKEN_ID_BYTES = 4
SHARE_MAX = 1 / 4
"""Share of this process's memory that it may take, so that a capacity copied from Vineyard cannot exhaust it."""


def memory_bytes(layout: Layout, capacity_tokens: int) -> int:
    """Returns the memory for the chunks of this many tokens: at least 16 MiB, at most a quarter of all there is."""
    chunk_bytes = header_bytes(TOKEN_ID_BYTES * layout.chunk_tokens, layout.section_count) + layout.chunk_bytes
    chunks = -(-capacity_tokens // layout.chunk_tokens)
    wanted = min(chunks * _whole_pages(chunk_bytes), int(memory_there_bytes() * SHARE_MAX))
    return max(MEMORY_BYTES_MIN, _whole_pages(wanted))


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
