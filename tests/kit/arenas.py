"""Workers with memory, in this process or in one of their own, and clients that map it, for tests."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore import Layout
from kvstore.core.buffers import Planes
from kvstore.core.namespace import Namespace
from kvstore.core.write_mode import WriteMode
from kvstore.engine.settings import Limits, TierSettings
from kvstore.format.keyset import ChunkKeys
from kvstore.root.interface import Root
from kvstore.tiers.memory import MemoryTier
from kvstore.worker.limits import WorkerLimits
from tests.kit.workers import WAIT_S, Served, eventually, serving

MEMORY_BYTES = 64 << 20


@contextmanager
def serving_memory(
    root: Root | Path | None = None,
    memory_bytes: int = MEMORY_BYTES,
    *,
    limits: Limits | None = None,
    worker_limits: WorkerLimits | None = None,
) -> Iterator[Served]:
    """A worker with memory on ``root`` (in memory itself where none is given), stopped at the end."""
    tiers = TierSettings(memory_bytes=memory_bytes)
    with serving(root, limits=limits, worker_limits=worker_limits, tiers=tiers) as served:
        yield served


def memory_of(served: Served) -> MemoryTier:
    """The memory of a worker in this process."""
    memory = served.member.node.memory
    assert memory is not None
    return memory


def filled(
    served: Served, tokens: npt.NDArray[np.int64], kv: npt.NDArray[np.float16], layout: Layout, name: str = "m"
) -> ChunkKeys:
    """Puts a prompt on the root and in memory, from within the worker; its chain."""
    namespace = Namespace(name, layout)
    served.member.claim_namespace(namespace)
    chain = ChunkKeys.of(namespace, tokens.astype(np.uint32))
    planes = Planes(kv, layout.section_bytes)
    served.member.node.put(chain, 0, planes, write=WriteMode.THROUGH)
    assert memory_of(served).leading(chain) == len(chain)
    return chain


def lose(served: Served, chain: ChunkKeys, start: int, stop: int) -> None:
    """Takes chunks ``start`` to ``stop - 1`` out of memory, whatever comes behind them."""
    memory = memory_of(served)
    with memory.refer(chain, start, stop - start) as slots, memory._lock:
        for entry in slots.entries:
            assert entry is not None
            memory._inventory.drop(entry)
    assert memory.leading(chain, start) == 0


def referenced_bytes(served: Served) -> int:
    """Returns the bytes of memory that somebody refers to."""
    return int(memory_of(served).stats()["memory_referenced_bytes"])


def all_let_go(served: Served) -> None:
    """Waits until nobody refers to anything in memory: no lease is alive, and no hold."""
    leases_end(served)
    eventually(lambda: not referenced_bytes(served), "nothing in memory is referred to")


def leases_end(served: Served) -> None:
    """Waits until no lease is alive."""
    eventually(lambda: not served.worker.service.bulk_requests.leases, "no lease is alive")
    assert memory_of(served).stats()["memory_leased_bytes"] == 0


def mapped_bytes(pid: int) -> dict[str, int]:
    """Returns the kernel's figures of a process's mappings of a file: sums of Rss, Pss, shared and private parts."""
    sums: dict[str, int] = {}
    ours = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            ours = "memfd:kvstore-memory" in line
        elif ours and (found := re.match(r"^(\w+):\s+(\d+) kB", line)):
            sums[found[1]] = sums.get(found[1], 0) + 1024 * int(found[2])
    return sums


_CLIENT = """
import sys
import kvstore
from tests.kit.transports import MEDIUM, same, tokens_and_kv
chunks = int(sys.argv[2])
tokens, kv = tokens_and_kv(chunks)
with kvstore.connect(sys.argv[1], bulk="shared") as store:
    with store.namespace("m", MEDIUM).hold(tokens) as hold:
        views = hold.view()
    size = MEDIUM.chunk_tokens
    assert len(views) == chunks
    for at, view in enumerate(views):
        assert same(view, kv[:, :, at * size : (at + 1) * size])
    print("viewing", flush=True)
    sys.stdin.read()
"""


@contextmanager
def viewing_client(address: str, chunks: int) -> Iterator[subprocess.Popen[str]]:
    """A client in a separate process with views of the chunks of prompt 0."""
    client = subprocess.Popen(
        [sys.executable, "-c", _CLIENT, address, str(chunks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert client.stdout is not None and client.stdout.readline() == "viewing\n"
        yield client
    finally:
        client.kill()
        client.communicate(timeout=WAIT_S)
