"""LMCache's server mode: the store as its L2, by its ``plugin`` adapter.

LMCache calls from its controller threads and waits for event descriptors; our own threads do the work. Every failure is
a miss or a failed store, and every task ends: each step by its timeout (the first of a model by ``store_timeout_s``). A
task that waited longer than that for a thread is not started.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvstore.client import Cache
from kvstore.client.cache import BlockHold
from kvstore.connectors.common import LazyStore, RateLimitedLog
from kvstore.connectors.lmcache_keys import (
    OPAQUE,
    LMCacheSettings,
    bytes_of,
    name_of,
    places_by_name,
    tensors,
    tensors_of,
)
from kvstore.core.clock import Clock, SystemClock
from kvstore.core.executor import Tasks
from kvstore.errors import HoldBroken, KVStoreError

# Locks that LMCache took by a look-up and has not yet released: holds of the store, by LMCache's keys. A lock ends when
# its last key is unlocked, or after a time, because the process that should unlock may have died.


@dataclass(slots=True, eq=False)
class LockedHold:
    """One hold, and the number of its keys that are still locked."""

    hold: BlockHold
    keys: Sequence[Hashable]
    left: int
    ends_s: float


class Locks:
    """All locks of one adapter. Thread-safe."""

    def __init__(self, lock_s: float, clock: Clock) -> None:
        self._lock_s = lock_s
        self._clock = clock
        self._mutex = threading.Lock()
        self._by_key: dict[Hashable, deque[LockedHold]] = {}
        self._by_age: deque[LockedHold] = deque()

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, hold: BlockHold, keys: Sequence[Hashable]) -> None:
        """Locks ``keys``, which ``hold`` covers; releases the hold if there are none."""
        ended = self._expired()
        if keys:
            lock = LockedHold(hold, keys, len(keys), self._clock.monotonic_s() + self._lock_s)
            with self._mutex:
                self._by_age.append(lock)
                for key in keys:
                    self._by_key.setdefault(key, deque()).append(lock)
        else:
            ended.append(hold)
        for each in ended:
            each.release()

    def remove(self, keys: Sequence[Hashable]) -> None:
        """Unlocks each key once; skips those that are not locked. Never raises."""
        ended: list[BlockHold] = []
        with self._mutex:
            for key in keys:
                locks = self._by_key.get(key)
                if not locks:
                    continue
                lock = locks.popleft()
                if not locks:
                    del self._by_key[key]
                lock.left -= 1
                if not lock.left:
                    ended.append(lock.hold)
            while self._by_age and not self._by_age[0].left:
                self._by_age.popleft()
        for each in ended:
            each.release()

    def of(self, key: Hashable) -> BlockHold | None:
        """Returns the oldest hold on a key, or None."""
        with self._mutex:
            locks = self._by_key.get(key)
            return locks[0].hold if locks else None

    def clear(self) -> None:
        """Unlocks everything."""
        with self._mutex:
            holds = [lock.hold for lock in self._by_age if lock.left]
            self._by_age.clear()
            self._by_key.clear()
        for hold in holds:
            hold.release()

    def _expired(self) -> list[BlockHold]:
        """Removes and returns the holds of expired and ended locks."""
        now_s = self._clock.monotonic_s()
        ended: list[BlockHold] = []
        with self._mutex:
            while self._by_age and (not self._by_age[0].left or self._by_age[0].ends_s <= now_s):
                lock = self._by_age.popleft()
                if not lock.left:
                    continue
                for key in lock.keys:
                    locks = self._by_key.get(key)
                    if locks and lock in locks:
                        locks.remove(lock)
                        if not locks:
                            del self._by_key[key]
                lock.left = 0
                ended.append(lock.hold)
        return ended


log = logging.getLogger(__name__)

TASKS_MAX = 4096
"""Tasks of each kind that may wait for a thread; further ones miss, or fail to store, immediately."""
CLOSE_S = 5.0
"""Time that closing waits, in addition to the deadlines of tasks in progress."""

R = TypeVar("R")
T = TypeVar("T")


class _Outcomes(Generic[R]):
    """The results of one kind of task, until LMCache takes them, and the descriptor that signals them."""

    def __init__(self) -> None:
        self._notifier = create_event_notifier()
        self._lock = threading.Lock()
        self._done: dict[int, R] = {}
        self._closed = False
        self.fileno: int = self._notifier.fileno()

    def put(self, task: int, result: R) -> None:
        with self._lock:
            if not self._closed:
                self._done[task] = result
                self._notifier.notify()

    def pop(self, task: int) -> R | None:
        with self._lock:
            return self._done.pop(task, None)

    def pop_all(self) -> dict[int, R]:
        with self._lock:
            done, self._done = self._done, {}
            return done

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._notifier.close()


class KVStoreL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """The adapter. ``config`` is LMCache's ``adapter_params``, with the keys of ``lmcache_keys.Settings``.

    Capacity and eviction are the store's own (``kvstore-gc``), so none is declared, ``delete`` does nothing, and keys
    cannot be listed: the store knows only their digests. Raises InvalidRequest for invalid settings, and what
    ``kvstore.open`` raises.
    """

    def __init__(self, config: dict[str, Any], **_: Any) -> None:
        super().__init__(max_capacity_bytes=0)
        self._settings = settings = LMCacheSettings.of(config, "adapter_params")
        self._store = LazyStore(settings)
        self._clock = SystemClock()
        self._locks = Locks(settings.lock_s, self._clock)
        self._ids = itertools.count()
        self._stored: _Outcomes[L2StoreResult] = _Outcomes()
        self._found: _Outcomes[Bitmap] = _Outcomes()
        self._loaded: _Outcomes[Bitmap] = _Outcomes()
        # Separate threads, so that a slow write never delays a read, nor a slow read a look-up.
        fewer = max(1, settings.threads // 2)
        self._lookers = Tasks("kvstore-lmcache-look", fewer, TASKS_MAX)
        self._readers = Tasks("kvstore-lmcache-read", settings.threads, TASKS_MAX)
        self._writers = Tasks("kvstore-lmcache-write", fewer, TASKS_MAX)
        # The same number of bytes says nothing of what a serialiser made them from, and LMCache does not say.
        self._has_opaque = bool(settings.serde)
        """True if there may be objects that are only bytes: a name of ours says so, or this process stored some."""
        self._opaque = f"serde {settings.serde}" if settings.serde else f"process {secrets.token_hex(16)}"
        self._trouble = RateLimitedLog(log, "lmcache.task_failed")

    # Descriptors

    def get_store_event_fd(self) -> int:
        return self._stored.fileno

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._found.fileno

    def get_load_event_fd(self) -> int:
        return self._loaded.fileno

    # Storing

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        store = partial(self._stores, keys, objects)
        return self._submit(self._writers, self._stored, store, L2StoreResult(False, 0), self._settings.store_timeout_s)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stored.pop_all()

    def _stores(self, keys: list[Any], objects: list[Any]) -> L2StoreResult:
        written, good = 0, len(keys) == len(objects)
        left = len(keys)
        for cache, places in self._in_time(self._by_model(keys), self._settings.store_timeout_s):
            left -= len(places)
            names = [self._key_of(keys[place], objects[place]) for place in places]
            buffers = [bytes_of(objects[place]) for place in places]
            # Of an object that is only bytes the first stays, whatever its size.
            lacking = [at for at, found in enumerate(cache.blocks.present(names)) if not found]
            stored = cache.blocks.put([names[at] for at in lacking], [buffers[at] for at in lacking])
            sizes = {places[at]: len(buffers[at]) for at, is_stored in zip(lacking, stored, strict=True) if is_stored}
            good = good and all(stored)
            written += sum(sizes.values())
            if sizes:
                self._notify_keys_stored([keys[place] for place in sizes], list(sizes.values()))
        return L2StoreResult(good and not left, written)

    # Looking up

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        look = partial(self._look, keys, group_layout_descs)
        return self._submit(self._lookers, self._found, look, Bitmap(len(keys)), self._settings.lookup_timeout_s)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._found.pop(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        self._locks.remove(keys)

    def _look(self, keys: list[Any], layouts: dict[int, Any]) -> Bitmap:
        found = Bitmap(len(keys))
        made_of = {group: tensors(each.shapes, each.dtypes) for group, each in (layouts or {}).items()}
        for cache, places in self._in_time(self._by_model(keys), self._settings.lookup_timeout_s):
            places = self._hold(cache, keys, places, made_of, found)
            # A compressed object is only bytes to us, whatever tensors it holds.
            places = [place for place in places if made_of.get(keys[place].object_group_id, OPAQUE) != OPAQUE]
            if places and self._has_opaque:
                self._hold(cache, keys, places, {}, found)
        return found

    def _hold(
        self, cache: Cache, keys: list[Any], places: list[int], made_of: dict[int, str], found: Bitmap
    ) -> list[int]:
        """Locks the keys that are in the store; returns the places of those that are not."""
        names = [self._name_of(keys[place], made_of.get(keys[place].object_group_id, OPAQUE)) for place in places]
        hold = cache.blocks.hold(names, self._settings.lock_s)
        hits = [place for place, present in zip(places, hold.present, strict=True) if present]
        self._locks.add(hold, [keys[place] for place in hits])
        for place in hits:
            found.set(place)
        return [place for place, present in zip(places, hold.present, strict=True) if not present]

    # Loading

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        load = partial(self._loads, keys, objects)
        return self._submit(self._readers, self._loaded, load, Bitmap(len(keys)), self._settings.load_timeout_s)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loaded.pop(task_id)

    def _loads(self, keys: list[Any], objects: list[Any]) -> Bitmap:
        loaded = Bitmap(len(keys))
        ends_s = self._clock.monotonic_s() + self._settings.load_timeout_s
        for cache, places in self._by_model(keys):
            names = [self._key_of(keys[place], objects[place]) for place in places]
            buffers = [bytes_of(objects[place]) for place in places]
            by_hold = self._by_hold([keys[place] for place in places])
            for hold, at in self._in_time(by_hold, ends_s - self._clock.monotonic_s()):
                part = [names[each] for each in at], [buffers[each] for each in at]
                try:
                    hits = hold(*part)
                except HoldBroken:
                    hits = cache.blocks.get(*part)  # it may still be there
                for each, hit in zip(at, hits, strict=True):
                    if hit:
                        loaded.set(places[each])
        hits = [keys[place] for place in loaded.get_indices_list()]
        if hits:
            self._notify_keys_accessed(hits)
        return loaded

    def _by_hold(self, keys: list[Any]) -> list[tuple[Callable[..., list[bool]], list[int]]]:
        """Pairs each key with its way to be read: under the hold of its lock, or without one."""
        groups: dict[int, tuple[Callable[..., list[bool]], list[int]]] = {}
        for at, key in enumerate(keys):
            hold = self._locks.of(key)
            read = hold.get if hold is not None else self._cache(key.model_name).blocks.get
            groups.setdefault(id(hold), (read, []))[1].append(at)
        return list(groups.values())

    # The rest

    def get_memory_tags(self) -> Any:
        """Storage: of this host if its processes alone share the root, else remote. LMCache calls it from 0.5.7 on."""
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags  # not in 0.5.6

        root = self._settings.root
        is_local = root is not None and not self._settings.etcd and urlsplit(root).scheme in ("", "file")
        return MemoryTags(MemorySegment.STORAGE, MemoryResidency.LOCAL if is_local else MemoryResidency.REMOTE)

    def report_status(self) -> dict[str, Any]:
        """The state of the adapter: the error of the last call to the store, if it failed."""
        failing = self._trouble.why
        return {
            "is_healthy": not failing,
            "type": type(self).__name__,
            "error": failing,
            "locked_keys": len(self._locks),
            "place": {key: str(value) for key, value in self._settings.place().items() if key != "root_options"},
        }

    def close(self) -> None:
        """Ends tasks in progress, then closes the store. LMCache's memory is not touched after the return."""
        settings = self._settings
        ended = self._lookers.close(CLOSE_S + 2 * settings.lookup_timeout_s)
        ended = self._readers.close(CLOSE_S + 2 * settings.load_timeout_s) and ended
        ended = self._writers.close(CLOSE_S + settings.store_timeout_s) and ended
        if not ended:
            log.warning("lmcache.close why=tasks did not end in time")
        self._locks.clear()
        self._store.close()
        for each in (self._stored, self._found, self._loaded):
            each.close()

    def _submit(
        self, threads: Tasks, outcomes: _Outcomes[R], work: Callable[[], R], failure: R, timeout_s: float
    ) -> int:
        """Queues ``work``; its result, or ``failure``, is put where LMCache looks for it."""
        task = next(self._ids)
        begin_by_s = self._clock.monotonic_s() + timeout_s
        if not threads.submit(partial(self._do, task, outcomes, work, failure, begin_by_s)):
            self._trouble.failed("too many tasks wait for the store, or it is closed")
            outcomes.put(task, failure)
        return task

    def _do(self, task: int, outcomes: _Outcomes[R], work: Callable[[], R], failure: R, begin_by_s: float) -> None:
        result = failure
        try:
            if self._clock.monotonic_s() > begin_by_s:
                self._trouble.failed("tasks waited too long for a thread")
                return
            result = work()
            self._trouble.went_well()
        except KVStoreError as error:
            self._trouble.failed(error)
        except Exception as error:
            self._trouble.failed(f"{type(error).__name__}: {error}")
            raise
        finally:
            outcomes.put(task, result)  # without it LMCache would wait for ever

    def _in_time(self, parts: Iterable[T], timeout_s: float) -> Iterator[T]:
        """Yields ``parts``, and starts none after the time is up: each has a deadline, but there may be many."""
        ends_s = self._clock.monotonic_s() + timeout_s
        for part in parts:
            if self._clock.monotonic_s() > ends_s:
                return
            yield part

    def _name_of(self, key: Any, made_of: str) -> bytes:
        return name_of(key, made_of, self._opaque)

    def _key_of(self, key: Any, made: Any) -> bytes:
        """Returns the block's key: LMCache's key, and the object that is stored or loaded."""
        made_of = tensors_of(made.meta)
        self._has_opaque = self._has_opaque or made_of == OPAQUE
        return self._name_of(key, made_of)

    def _cache(self, model: str) -> Cache:
        return self._store.model("lmcache", model, {"engine": "lmcache", "interface": "l2"})

    def _by_model(self, keys: Sequence[Any]) -> list[tuple[Cache, list[int]]]:
        return [(self._cache(model), at) for model, at in places_by_name([key.model_name for key in keys]).items()]
