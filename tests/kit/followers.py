"""A follower without threads, on a root and metadata of its own, whose watches a test can hook into."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kvstore.core.clock import RandomIds, SystemClock
from kvstore.engine.engine import Engine
from kvstore.engine.follower import GcFollower, StartFence
from kvstore.engine.gc_state import ClusterGcState
from kvstore.engine.settings import Limits
from kvstore.meta.cluster import Standing
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMetadata, MemoryStore
from kvstore.meta.session import Session
from kvstore.meta.store import Event, Watch
from kvstore.root.identity import create_or_open
from kvstore.root.interface import Root
from kvstore.root.memory import MemoryFiles, MemoryRoot

SWEEP = b"s" * 16
ALONE_LIMITS = Limits(io_threads=1, width=1, announce_s=1e-9)


class Hooked:
    """A watch that runs a hook on what it has fetched before it returns it."""

    def __init__(self, inner: Watch, fetched: Callable[[], None]) -> None:
        self._inner = inner
        self._fetched = fetched

    def next(self, timeout_s: float) -> tuple[Event, ...] | None:
        events = self._inner.next(timeout_s)
        self._fetched()
        return events

    def close(self) -> None:
        self._inner.close()


class HookedMeta(MemoryMetadata):
    """Metadata whose watches do that, and that do something before they open one; both may be replaced at any time."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.fetched: Callable[[], None] = nothing
        self.opening: Callable[[], None] = nothing

    def watch(self, prefix: str, from_revision: int) -> Hooked:  # type: ignore[override]
        self.opening()
        return Hooked(super().watch(prefix, from_revision), self._has_fetched)

    def _has_fetched(self) -> None:
        self.fetched()


class SilentWatch:
    """A watch that reports nothing more, like one on a store that was restored to an older revision."""

    def next(self, timeout_s: float) -> tuple[Event, ...] | None:
        threading.Event().wait(min(timeout_s, 0.01))
        return None

    def close(self) -> None: ...


def nothing() -> None:
    pass


class Fence(StartFence):
    """A fence whose comparison with etcd a test chooses."""

    found: Callable[[], Standing]

    def standing(self) -> Standing:
        return self.found()


class Alone:
    """A follower without threads, on its own root and store."""

    def __init__(
        self, root: Root | None = None, standing: Callable[[], Standing] | None = None, limits: Limits = ALONE_LIMITS
    ) -> None:
        root, clock, ids = root or MemoryRoot(MemoryFiles()), SystemClock(), RandomIds()
        identity = create_or_open(root, ids)
        self.meta = HookedMeta(MemoryStore(clock))
        self.keys = Keys(identity.root)
        self.node = Engine(root, identity, session=lambda: bytes(16), limits=limits, clock=clock, ids=ids)
        assert isinstance(self.node.gc_view, ClusterGcState)
        self.view = self.node.gc_view
        fence: Fence | None = None
        if standing is not None:
            fence = Fence(self.node, self.meta, self.keys)
            fence.found = standing
        self.follower = GcFollower(self.node, self.view, self.meta, self.keys, fence)

    @property
    def following(self) -> Any:
        """What the follower follows in its session."""
        assert self.follower._following is not None
        return self.follower._following

    def session(self) -> Session:
        return Session.open(self.meta, self.keys, clock=SystemClock(), ids=RandomIds())
