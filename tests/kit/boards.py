"""Boards over a real store in memory, for tests: the documents that the dashboard makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.dashboard.views import Board, RefreshIntervals
from kvstore.meta.memory import MemoryMetadata
from kvstore.root.memory import MemoryFiles, MemoryRoot
from tests.kit.faulty_meta import FaultyMeta
from tests.kit.faulty_root import FaultyRoot
from tests.kit.patience import slowness
from tests.kit.stores import member_on

QUICK = RefreshIntervals(0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, late_s=0.3)


@dataclass(frozen=True, slots=True)
class Shown:
    """A store, faults that only the dashboard meets, and its documents."""

    store: Store
    root: FaultyRoot
    meta: FaultyMeta
    files: MemoryFiles
    board: Board


@contextmanager
def shown(collector: Sequence[str] | None = None) -> Iterator[Shown]:
    """A dashboard of a store in memory, its feeds running; ``collector`` is the command that makes its plans."""
    files = MemoryFiles()
    root, meta = MemoryRoot(files), MemoryMetadata()
    store = Store(LocalTransport(member_on(root, meta=meta, in_cluster=True)))
    faulty_root, faulty_meta = FaultyRoot(root), FaultyMeta(meta)
    pace = replace(QUICK, late_s=QUICK.late_s * slowness())
    board = Board(root.url, lambda: faulty_root, lambda: faulty_meta, lambda root_id: store, collector, pace)
    try:
        board.start()
        yield Shown(store, faulty_root, faulty_meta, files, board)
    finally:
        faulty_meta.heal()
        board.close()
        store.close()
