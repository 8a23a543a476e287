"""The collector of a root that the processes of one host share without etcd.

It keeps room ahead of need: when the used bytes come closer to the limit than the *headroom*, it evicts the chunks that
are worth least, in small batches, until they are not. It ranks the chunks once per listing, and lists again when the
ranking runs out, and now and then for what is past its time to live.

As ``python -m kvstore_gc.host FOLDER`` it is the child of a store, and runs with the base install; ``kvstore-gc`` also
needs the packages of the ``server`` extra.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from kvstore.core.clock import SystemClock
from kvstore.errors import InvalidRequest, KVStoreError, RootMismatch
from kvstore.format import places
from kvstore.format.places import Name
from kvstore.host import tables as shared_file
from kvstore.host.eviction import Evicted, Eviction, begin_listing, settled
from kvstore.host.tables import (
    BATCH_MAX,
    COLLECTOR,
    InUse,
    LiveTable,
    Number,
    Own,
    Shared,
    limit_on,
    live_tables,
    locked,
    smallest,
    why_not_shared,
)
from kvstore.root.identity import newest_number, read_identity, read_namespaces
from kvstore.root.open import open_root
from kvstore.root.posix import FILE_MODE, PosixRoot, translated
from kvstore_gc.config import Config
from kvstore_gc.rank import Ranking, victims_of

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HEADROOM_SHARE = 0.05
HEADROOM_SHARE_MAX = 0.25
LOOK_S = 0.005
"""Time between two looks at the used bytes while any process writes."""
TABLES_S = 0.1
"""Time between two looks at what the processes ask for."""
IDLE_LOOK_S = 0.05
IDLE_S = 1.0
LISTING_S_MAX = 600.0
"""Time between two listings if nothing else asks for one."""
AGAIN_S = 0.25
"""The least time between two listings of a root where nothing could be evicted; more if a listing takes long."""
STAGED_S = 60.0
"""A staged file that is of no live process goes after this: a pin may take long to be synced."""
PROBED_S = 0.5
"""A process that checks for a running collector has the lock for less than this."""
QUARANTINE_S = 86_400.0
QUARANTINE_SHARE = 0.01
"""A damaged file that was set aside goes after this, or when all take this share of the limit."""


class CollectorBusy(InvalidRequest):
    """Another process collects the root."""


class HostCollector:
    """The collector of one root. One thread."""

    def __init__(self, root: PosixRoot, shard_bits: int, shared: Shared, config: Config) -> None:
        self._root = root
        self._shard_bits = shard_bits
        self._shared = shared
        self._config = config
        self._clock = SystemClock()
        self._ranking: Ranking | None = None
        self._eviction: Eviction | None = None
        self._listed_s = -LISTING_S_MAX
        self._listing_s = 0.0
        self._latency_s = 0.0
        self._rate = 0.0
        self._freed = 0
        """Bytes that were evicted by the last listing."""
        self._looked = (time.monotonic(), shared[Number.WRITTEN])
        self._tables: list[LiveTable] = []
        self._tables_s = -TABLES_S

    def serve(self, is_signalled: Callable[[float], bool]) -> None:
        """Collects until a signal comes."""
        changed_s, before, failed = 0.0, 0, False
        while True:
            self._shared.add(Number.BEATS, 1)
            now_s, used = time.monotonic(), self._shared[Number.USED]
            if used != before:
                changed_s, before = now_s, used
            if is_signalled(LOOK_S if now_s - changed_s < IDLE_S else IDLE_LOOK_S):
                return
            try:
                self.step()
                failed = False
            except (KVStoreError, OSError) as error:
                log.log(logging.DEBUG if failed else logging.WARNING, "collector.failed %s", error)
                failed = True
                if is_signalled(IDLE_S):
                    return

    def step(self) -> None:
        """Makes room if there is less than the headroom; lists the root if that is due. Raises the root's errors."""
        began_s = time.monotonic()
        limit, ttl_s = self._limit()
        lists_after_s = LISTING_S_MAX if ttl_s is None else min(LISTING_S_MAX, max(1.0, ttl_s / 4))
        if began_s - self._listed_s >= lists_after_s:
            self.list(ttl_s)
            self._evict(0)
        if self._shared[Number.SETTLED] != self._shared[Number.TAIL]:
            with settled(self._root.path, self._shared):  # what a killed process left counts as absent until then
                pass
        if limit and self._make_room(limit, ttl_s):
            self._latency_s = 0.75 * self._latency_s + 0.25 * (time.monotonic() - began_s)

    def list(self, ttl_s: float | None = None, listed: Callable[[], object] = lambda: None) -> Ranking:
        """Lists the root, corrects the count of used bytes, and removes leftovers. Raises the root's errors."""
        shared, began_s = self._shared, time.monotonic()
        begun, written, reserved = shared[Number.BEGUN], shared[Number.WRITTEN], self._reserved_bytes()
        deleted, used = shared[Number.DELETED], shared[Number.USED]
        # A put that began since the look at the tables, or ended, may count in the sum and not in them.
        reserved += shared[Number.BEGUN] - begun + shared[Number.WRITTEN] - written
        failed: list[KVStoreError] = []
        namespaces = read_namespaces(self._root, failed) if self._config.shares else ()
        for each in failed:
            log.warning("collector.quota_unknown %s", each)
        goals = replace(self._config.goals(namespaces), ttl_s=ttl_s)
        since_ns = begin_listing(self._root.path, shared)
        ranking = Ranking(goals, self._clock.now_s(), self._shard_bits)
        others = self._leftovers()

        looked_s = began_s

        def between(shard: int) -> None:
            nonlocal looked_s
            listed()
            limit, now_s = shared[Number.LIMIT], time.monotonic()
            if limit and now_s - looked_s >= LOOK_S:
                self._evict(self._lacking(limit))  # by the ranking before
                looked_s = time.monotonic()

        ranking.read(self._root, range(self.shards_count), listed=between)
        ranking.rank()
        # The listing may or may not contain concurrent writes and deletions: correct only what they do not explain.
        error = ranking.total.bytes + ranking.foreign.bytes + others + reserved - used
        written, deleted = shared[Number.WRITTEN] - written, shared[Number.DELETED] - deleted
        if error >= 0 or ranking.is_whole:
            shared.add(Number.USED, min(0, error + deleted) if error < 0 else max(0, error - reserved - written))
        self._ranking = ranking
        self._eviction = Eviction(self._root, self._shard_bits, shared, self._clock, since_ns)
        self._listed_s = time.monotonic()
        self._listing_s = self._listed_s - began_s
        return ranking

    def _reserved_bytes(self) -> int:
        """Returns the bytes that live processes have reserved."""
        return sum(table.numbers[Own.RESERVED] for table in live_tables(self._root.path, self._shared))

    @property
    def shards_count(self) -> int:
        """The number of shards of the root."""
        return 1 << self._shard_bits

    def once(self, listed: Callable[[], object] = lambda: None) -> Evicted:
        """Lists the root once, evicts what is due and what is over the limit, less the headroom. Raises the root's
        errors. ``listed`` is called after each shard.
        """
        limit, ttl_s = self._limit()
        self.list(ttl_s, listed)
        done = self._evict(0)
        if limit:
            limit, _ = self._limit()
            done += self._evict(self._lacking(limit))
            done.lacking_bytes = max(0, self._lacking(limit))
        return done

    def _limit(self) -> tuple[int, float | None]:
        """Publishes the limit of all that share the root: the smallest of theirs, or what the disk has room for."""
        shared, now_s = self._shared, time.monotonic()
        if now_s - self._tables_s >= TABLES_S:
            self._tables, self._tables_s = live_tables(self._root.path, self._shared), now_s
        tables = self._tables
        max_bytes, ttl_s = smallest(tables, self._config.max_bytes, self._config.ttl_s)
        limit = limit_on(self._root, max_bytes, shared) if max_bytes else 0
        shared[Number.LIMIT] = limit
        shared[Number.WAKES_AT] = limit - self._headroom(limit, tables) if limit else 0
        return limit, ttl_s

    def _headroom(self, limit: int, tables: Sequence[LiveTable]) -> int:
        now_s, written = time.monotonic(), self._shared[Number.WRITTEN]
        then_s, before = self._looked
        if now_s - then_s >= 0.1:
            self._rate = 0.5 * self._rate + 0.5 * (written - before) / (now_s - then_s)
            self._looked = (now_s, written)
        put_max = max((table.numbers[Own.PUT_MAX] for table in tables), default=0)
        wanted = max(HEADROOM_SHARE * limit, 2 * put_max, self._rate * 2 * (self._latency_s + LOOK_S))
        waiting = sum(table.numbers[Own.WAITING] for table in tables)
        return min(limit - 1, max(int(min(wanted, HEADROOM_SHARE_MAX * limit)), waiting))

    def _lacking(self, limit: int) -> int:
        return self._shared[Number.USED] - (self._shared[Number.WAKES_AT] or limit)

    def _make_room(self, limit: int, ttl_s: float | None) -> bool:
        """Evicts until there is the headroom; False if there is. Says so if nothing can be evicted."""
        lacking = self._lacking(limit)
        if lacking <= 0:
            self._shared[Number.FULL] = 0
            return False
        done = self._evict(lacking)
        self._freed += done.size_bytes
        # List ahead of need, and not again and again where a listing brings nothing.
        left = self._ranking.left_bytes if self._ranking is not None else 0
        needed = self._lacking(limit) + self._rate * 2 * self._listing_s
        pause_s = 0.0 if self._freed else max(AGAIN_S, 4 * self._listing_s)
        if needed > left and time.monotonic() - self._listed_s >= pause_s:
            self.list(ttl_s)
            self._freed = 0
            done += self._evict(self._lacking(limit))
            self._freed = done.size_bytes
            # What puts write at this moment, or have just written, can be evicted soon.
            is_full = not done.count and not done.used_count and self._lacking(limit) > self._reserved_bytes()
            self._shared[Number.FULL] = time.monotonic_ns() if is_full else 0
        elif done.count or self._shared[Number.FULL]:
            self._shared[Number.FULL] = 0 if done.count else time.monotonic_ns()
        return True

    def _evict(self, size_bytes: int) -> Evicted:
        """Evicts chunks of ``size_bytes`` together, and all that are due; fewer if the ranking runs out."""
        done = Evicted()
        while self._ranking is not None and self._eviction is not None:
            victims = victims_of(self._ranking.take(size_bytes - done.size_bytes, BATCH_MAX))
            if not victims:
                break
            done += self._eviction.evict(victims)
        return done

    def _leftovers(self) -> int:
        """Removes obsolete files other than chunks; returns the bytes of what stays. Raises the root's errors if it
        cannot list them: what cannot be removed must not keep it from making room.
        """
        sessions = {table.session for table in live_tables(self._root.path, self._shared)}
        left = 0
        for folder in [entry.name for entry in self._root.list(places.STAGING) if entry.stat is None]:
            if folder in sessions:
                continue
            path = Name(f"{places.STAGING}/{folder}")
            try:
                files = [Name(f"{path}/{entry.name}") for entry in self._root.list(path)]
                old = [name for name in files if self._age_s(name) >= STAGED_S]
                if all(self._removed(name) for name in old) and len(old) == len(files):
                    self._root.remove_folder(path)
            except KVStoreError as error:
                log.warning("collector.not_removed %s", error)
        for entry in list(self._root.list(places.QUARANTINE)):
            name = Name(f"{places.QUARANTINE}/{entry.name}")
            size_bytes = entry.stat.size_bytes if entry.stat is not None else 0
            fits = left + size_bytes <= QUARANTINE_SHARE * (self._shared[Number.LIMIT] or math.inf)
            stays = not places.is_quarantined(entry.name) or (fits and self._age_s(name) < QUARANTINE_S)
            if stays or not self._removed(name):
                left += size_bytes
        return left

    def _removed(self, name: Name) -> bool:
        try:
            self._root.remove(name)
        except KVStoreError as error:
            log.warning("collector.not_removed %s", error)
            return False
        return True

    def _age_s(self, name: str) -> float:
        try:
            return time.time() - os.lstat(f"{self._root.path}/{name}").st_ctime
        except OSError:
            return 0.0


@contextmanager
def opened(url: str, config: Config, options: Mapping[str, Any], wait_s: float = PROBED_S) -> Iterator[HostCollector]:
    """The collector of the root at ``url``, while no other collects it.

    Raises Busy if another one does for longer than ``wait_s``, InvalidRequest if the root is not a folder that the
    processes of this host share, and what opening a root raises.
    """
    root = open_root(url, options, create=False)
    in_use = shared = None
    try:
        if not isinstance(root, PosixRoot):
            raise InvalidRequest(f"{root.url}: it is not a folder: give --etcd ENDPOINTS: it knows who is using what")
        identity = read_identity(root)
        if identity is None:
            raise RootMismatch(f"{root.url} is not a kvstore root: it has no FORMAT file. Is the file system mounted?")
        why = why_not_shared(root.path) or ("it belongs to a cluster" if newest_number(root) else None)
        if why is not None:
            raise InvalidRequest(f"{root.url}: {why}: give --etcd ENDPOINTS: it knows who is using what")
        in_use = InUse(root.path)
        path = root.path
        with translated("open", f"{path}/host"):
            in_use.join(lambda: shared_file.is_made(path), lambda: shared_file.make(path, 0))
            shared = Shared(path)
        with settled(path, shared):
            pass
        with _alone(path, wait_s):
            yield HostCollector(root, identity.shard_bits, shared, config)
    finally:
        if shared is not None:
            shared.close()
        if in_use is not None:
            in_use.close()
        root.close()


@contextmanager
def _alone(folder: str, wait_s: float) -> Iterator[None]:
    """Collects alone. The file names the process that does."""
    path = f"{folder}/{COLLECTOR}"
    with translated("lock", path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        if not locked(fd, wait_s=wait_s):
            pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
            raise CollectorBusy(f"{folder}: process {pid} collects it at this moment: end that, or let it")
        with suppress(OSError):  # a full disk, which this makes room on
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def main() -> None:
    """Collects until a signal comes, or another collector is there."""
    parser = argparse.ArgumentParser(prog="kvstore_gc.host")
    parser.add_argument("folder")
    folder = parser.parse_args().folder
    # Threads inherit the mask, so that only the wait below receives a signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        with opened(folder, Config(), {}, wait_s=5.0) as collector:
            collector.serve(_is_signalled)
    except CollectorBusy:
        return
    except KVStoreError as error:
        sys.exit(str(error))


def _is_signalled(timeout_s: float) -> bool:
    return signal.sigtimedwait(SIGNALS, timeout_s) is not None


if __name__ == "__main__":
    main()
