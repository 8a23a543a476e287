"""Workers with memory, and clients of them, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kvstore.client.cache import Cache
from kvstore.core.operations import OperationState
from kvstore.core.write_mode import WriteMode, WriteModeName
from kvstore.root.interface import Root
from kvstore.worker.server import Worker
from tests.kit.tiers import QUICK, Acting
from tests.kit.workers import Served, connected


@contextmanager
def working(
    root: Root, *, write: WriteMode = WriteMode.UNCACHED, disk: Path | None = None
) -> Iterator[tuple[Acting, Served]]:
    """A worker with memory, and the member behind it."""
    limits = replace(QUICK, write_deadline_s=10.0, operations_max=32)
    with Acting(root, write=write, disk=disk, limits=limits) as acting:
        worker = Worker(acting.member, "127.0.0.1:0")
        worker.start()
        try:
            yield acting, Served(worker, acting.member)
        finally:
            worker.stop()


@contextmanager
def caching(
    served: Served, acting: Acting, bulk: str | None = None, *, write: WriteModeName | None = None
) -> Iterator[Cache]:
    """A client's cache of the same namespace as the acting member's."""
    with connected(served, bulk=bulk, write=write) as store:
        yield store.namespace("m", acting.cache.layout)


def waiters(served: Served) -> int:
    """The number of calls that wait for the end of an operation at the worker."""
    return served.worker.limits.calls_max // 2 - served.worker.control._waiters._value


def running(served: Served) -> int:
    """The number of operations that run at the worker."""
    return served.member.node.operations.count(OperationState.RUNNING)
