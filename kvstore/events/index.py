"""The index of a publisher: which chunks there are, and which of them are about to be deleted."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore.census.selection import ClearOrder
from kvstore.census.walk import read_fixed
from kvstore.core.address import NO_PARENT, Address, block_address, chunk_address
from kvstore.core.buffers import token_array
from kvstore.core.clock import Clock
from kvstore.core.namespace import Namespace, NamespaceId
from kvstore.errors import InvalidRequest, KVStoreError, RootMismatch
from kvstore.events.inventory import Difference, EventBlock, IndexEntry, NamespaceIndex
from kvstore.events.limits import EventLimits
from kvstore.format import places
from kvstore.format.header import (
    FIXED_BYTES,
    PAGE_BYTES,
    Damage,
    Damaged,
    Descent,
    IdentityKind,
    decode_any,
    is_encrypted,
)
from kvstore.meta.keys import Keys, part_of
from kvstore.meta.store import KeyValue, MetadataStore, Watch, WatchLost
from kvstore.meta.sweeps import Condemned
from kvstore.root.identity import read_namespaces
from kvstore.root.interface import Root
from kvstore.root.posix import folder_time, list_names

# Which shards have to be listed, and when: decided from the times of their folders. Pure: no I/O, no clock.
#
# A listing may miss a change within the file system's clock tick in which it starts. So a folder is listed
# immediately when its time changes, and once more when that time has stood for ``settle_s`` by our own clock.


Bools = npt.NDArray[np.bool_]
NEVER_S = float("-inf")
BURST_S = 0.5
"""Time for listings that may be saved up while nothing changes."""


class ListingScheduler:
    """The shards of one root. Times are monotonic seconds of the publisher, folder times are numbers to compare."""

    def __init__(self, count: int, limits: EventLimits) -> None:
        self._limits = limits
        self._times = np.full(count, -1, np.int64)
        self._since_s = np.full(count, NEVER_S)
        self._listed_times = np.full(count, -2, np.int64)
        self._listed_s = np.full(count, NEVER_S)
        self._must = np.ones(count, np.bool_)
        self._tried_s = np.full(count, NEVER_S)
        self._fails = np.zeros(count, np.bool_)
        self._next = 0
        self._credit_s = BURST_S
        self._counted_s = NEVER_S
        self.has_times = True
        """False if the root's folders have no times."""

    def to_look_at(self, now_s: float) -> list[int]:
        """Returns the shards whose folders are to be looked at now, in turns if there are many."""
        if not self.has_times:
            return []
        shards, rests = len(self._times), self._rests(now_s)
        count = min(shards, self._limits.folders_max)
        chosen = [(self._next + at) % shards for at in range(count)]
        self._next = (self._next + count) % shards
        return [shard for shard in chosen if not rests[shard]]

    def looked(self, shard: int, time: int | None, now_s: float) -> None:
        """Notes the time of a folder; None if it has none."""
        if time is None:
            self.has_times = False
        elif time != self._times[shard]:
            self._times[shard], self._since_s[shard] = time, now_s

    def must_list(self, shard: int | None) -> None:
        """Has a shard listed as soon as possible; None: all of them."""
        self._must[slice(None) if shard is None else shard] = True

    def due(self, now_s: float) -> int | None:
        """Returns the shard to list now, the one that was not tried for longest; None if there is none."""
        rests = self._rests(now_s)
        urgent = np.flatnonzero(self._must & ~rests)
        if len(urgent):
            return int(urgent[self._tried_s[urgent].argmin()])
        if self._credit(now_s) <= 0:
            return None
        is_due = ~rests & (now_s - self._listed_s >= self._limits.relist_s)
        if self.has_times:
            settled_s = self._since_s + self._limits.settle_s
            is_due &= (self._times != self._listed_times) | ((self._listed_s < settled_s) & (now_s >= settled_s))
        found = np.flatnonzero(is_due)
        return int(found[self._tried_s[found].argmin()]) if len(found) else None

    def listed(self, shard: int, time: int | None, began_s: float, ended_s: float) -> None:
        """Notes a whole listing; ``time`` is the folder's before it began."""
        self._listed_s[shard] = self._tried_s[shard] = began_s
        self._must[shard] = self._fails[shard] = False
        if time is not None:
            self.looked(shard, time, began_s)
            self._listed_times[shard] = time
        self._credit_s = self._credit(ended_s) - (ended_s - began_s)

    def failed(self, shard: int, now_s: float) -> None:
        """Notes that a folder cannot be read: it rests for a while, and others come first."""
        self._tried_s[shard], self._fails[shard] = now_s, True

    def _rests(self, now_s: float) -> Bools:
        return self._fails & (now_s - self._tried_s < self._limits.retry_s)

    def _credit(self, now_s: float) -> float:
        """Returns the time that listings may take now: a share of all time, saved up for a while."""
        earned_s = (now_s - self._counted_s) * self._limits.list_share
        self._credit_s, self._counted_s = min(BURST_S, self._credit_s + earned_s), now_s
        return self._credit_s


# Chunks that collectors and clears announce in etcd, to every node, before they delete them.
#
# A condemned chunk is a miss for every node from that moment (gc/PROTOCOL.md, H1), so the publisher reports it to
# routers then. When a sweep or a clear has ended, only a listing shows what it spared.


log = logging.getLogger(__name__)


@dataclass(slots=True)
class News:
    """The changes since the last look."""

    begun: list[frozenset[bytes]] = field(default_factory=list)
    ended: list[frozenset[bytes]] = field(default_factory=list)
    """Sweeps that are over: the shards of their chunks are to be listed."""
    clear_begun: bool = False
    clear_ended: bool = False
    """A clear is over: list everything."""


class PendingDeletions:
    """Follows the keys of sweeps and of clears that delete. Used by one thread."""

    def __init__(self, meta: MetadataStore, keys: Keys, limits: EventLimits) -> None:
        self._meta = meta
        self._keys = keys
        self._limits = limits
        self._sweeps: dict[int, tuple[bytes, frozenset[bytes]]] = {}
        self._clears: dict[str, ClearOrder] = {}
        self._watches: dict[str, Watch] = {}

    def news(self) -> News:
        """Applies what happened since the last call. Raises Unavailable if a lost watch could not begin again."""
        news = News()
        for prefix in (self._keys.gc, self._keys.clearing):
            try:
                watch = self._watches.get(prefix) or self._begin(prefix, news)
                while (events := watch.next(0.0)) is not None:
                    for event in events:
                        self._apply_key(event.key, event.kv, news)
            except WatchLost as lost:
                log.info("events.watch_lost %s %s", prefix, lost)
                self._watches.pop(prefix).close()
        return news

    def condemns(self, address: Address) -> bool:
        """True if a sweep in flight condemns it."""
        found = self._sweeps.get(part_of(address))
        return found is not None and address in found[1]

    def hides(self, namespace: bytes) -> bool:
        """True if a clear is deleting all of a namespace, by its id."""
        return any(order.means(NamespaceId(namespace)) for order in self._clears.values())

    def close(self) -> None:
        """Ends the watches. Idempotent."""
        for watch in self._watches.values():
            watch.close()
        self._watches = {}

    def _begin(self, prefix: str, news: News) -> Watch:
        """Reads everything under a prefix, and watches from there on."""
        snapshot = self._meta.list(prefix, self._limits.meta_deadline_s)
        watch = self._watches[prefix] = self._meta.watch(prefix, snapshot.revision + 1)
        there = {kv.key for kv in snapshot.items}
        if prefix == self._keys.gc:
            before = {self._keys.condemned_in(part) for part in self._sweeps}
        else:
            before = set(self._clears)
        for gone in before - there:
            self._apply_key(gone, None, news)
        for kv in snapshot.items:
            self._apply_key(kv.key, kv, news)
        return watch

    def _apply_key(self, key: str, kv: KeyValue | None, news: News) -> None:
        part = self._keys.parse_condemned(key)
        if part is not None:
            self._apply_sweep(part, kv, news)
        elif key.startswith(self._keys.clearing):
            self._apply_clear(key, kv, news)

    def _apply_sweep(self, part: int, kv: KeyValue | None, news: News) -> None:
        before = self._sweeps.pop(part, None)
        if kv is not None:
            try:
                self._sweeps[part] = kv.value, Condemned.from_bytes(kv.value).victims
                news.begun.append(self._sweeps[part][1])
            except RootMismatch as error:
                log.warning("events.sweep_unreadable part=%d %s", part, error)
        if before is not None and (kv is None or kv.value != before[0]):
            news.ended.append(before[1])

    def _apply_clear(self, key: str, kv: KeyValue | None, news: News) -> None:
        if kv is None:
            news.clear_ended |= self._clears.pop(key, None) is not None
            return
        try:
            self._clears[key] = ClearOrder.from_json(kv.value)
            news.clear_begun = True
        except InvalidRequest as error:
            log.warning("events.clear_unreadable %s", error)
            news.clear_ended = True


# Claims of files about engine-hashed blocks, checked as far as possible.
#
# The address proves the key, and with it the engine's hash. Tokens, parent and extras are the writer's claim: a false
# one misleads routers of its own namespace, as a false event of an engine would, and no read.


Number = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Text = Annotated[str, msgspec.Meta(max_length=1 << 10)]
FEW = msgspec.Meta(min_length=1, max_length=64)


class DescentExtra(msgspec.Struct):
    """The inputs of an engine's hash other than tokens that routers understand."""

    lora_name: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    extra_keys: (
        Annotated[tuple[Number | Text | Annotated[tuple[Number | Text | None, ...], FEW] | None, ...], FEW] | None
    ) = None


def claimed(namespace: Namespace, address: Address, prefix: bytes) -> EventBlock | None:
    """Returns what a file that begins with ``prefix`` says; None if it cannot be published. Raises Damaged."""
    header = decode_any(prefix)
    if header.kind is not IdentityKind.BLOCK or (header.address, header.namespace) != (address, namespace.digest):
        raise Damaged(Damage.IDENTITY)
    descent, key = Descent.unpack(header.descent), header.identity
    if descent is None or not key or block_address(namespace, key) != address or descent.hash_bytes > len(key):
        return None
    try:
        extra = msgspec.json.decode(descent.extra or b"{}", type=DescentExtra)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if len(descent.tokens) != namespace.layout.chunk_tokens:
        return None
    return EventBlock(
        address,
        block_address(namespace, descent.parent) if descent.parent else NO_PARENT,
        descent.depth,
        token_array(descent.tokens).tobytes(),
        _number(key[: descent.hash_bytes]),
        _number(descent.parent[: descent.hash_bytes]) if descent.parent else None,
        descent.group,
        extra.lora_name,
        extra.extra_keys,
    )


def _number(hashed: bytes) -> int:
    """Returns the low 64 bits of a hash, as vLLM makes numbers of its own."""
    return int.from_bytes(hashed[-8:], "big")


# What files say of chunks: parent, depth and tokens. Each is read once, while the file is there.
#
# Of a chunk of tokens nothing is believed that its address does not prove: it is the hash of parent and tokens. A
# block's address proves its key alone; the rest is what its writer says (``Descent``).


FILES_MAX = 512
"""Files read between two looks for news."""


def read_block(root: Root, shard_bits: int, namespace: Namespace, address: Address) -> EventBlock | None:
    """Returns what the file of a chunk says; None if it cannot be published: it is encrypted, or has no descent.

    Raises Damaged if it is gone or does not match its name, and the root's errors.
    """
    size = max(FIXED_BYTES + 4 * namespace.layout.chunk_tokens, 2 * PAGE_BYTES)
    seen = root.look(places.chunk(address, namespace.id, shard_bits), size)
    fixed = None if seen is None else read_fixed(seen.prefix)
    if seen is None or fixed is None:
        raise Damaged(Damage.MAGIC)
    if is_encrypted(seen.prefix):
        return None
    if fixed.kind is IdentityKind.BLOCK:
        return claimed(namespace, address, seen.prefix)
    tokens = seen.prefix[FIXED_BYTES : FIXED_BYTES + 4 * namespace.layout.chunk_tokens]
    if len(tokens) != 4 * namespace.layout.chunk_tokens:
        raise Damaged(Damage.SIZE)
    is_first = fixed.parent == NO_PARENT
    if chunk_address(namespace.digest, fixed.parent, tokens) != address or is_first != (fixed.depth == 0):
        raise Damaged(Damage.IDENTITY)
    parent_hash = None if is_first else _number(fixed.parent)
    return EventBlock(address, fixed.parent, fixed.depth, tokens, _number(address), parent_hash)


# The chunks that the root holds, and those about to be deleted, for all published namespaces; updated in steps.
#
# The order of a step matters. Condemned chunks are retracted first, because the promise for removals is the
# shortest. A shard is listed after the index has learned that its sweep ended, so what the listing finds was spared.


Wanted = Callable[[Namespace], bool]


@dataclass(slots=True)
class Model:
    """One namespace and its inventory."""

    namespace: Namespace
    inventory: NamespaceIndex
    unknown: deque[IndexEntry] = field(default_factory=deque)
    """Entries whose files are still to be read."""
    failed: list[IndexEntry] = field(default_factory=list)
    """Entries whose files were gone, damaged or could not be read; they are tried again at ``retry_s``."""
    retry_s: float = NEVER_S


class RootIndex:
    """The namespaces of one root. One thread steps; ``lock`` guards inventories for those who only ask."""

    def __init__(
        self,
        root: Root,
        shard_bits: int,
        doomed: PendingDeletions,
        wanted: Wanted,
        limits: EventLimits,
        clock: Clock,
    ) -> None:
        """``wanted`` selects the published namespaces."""
        self.lock = threading.Condition()
        self.models: dict[NamespaceId, Model] = {}
        self._root = root
        self._shard_bits = shard_bits
        self._doomed = doomed
        self._wanted = wanted
        self._limits = limits
        self._clock = clock
        self._folders = ListingScheduler(1 << shard_bits, limits)
        self._looked_s = NEVER_S
        self._unwanted: set[NamespaceId] = set()
        self._unrecorded: set[NamespaceId] = set()
        """Namespaces with chunks whose records could not be read yet."""
        self._records_s = NEVER_S
        self._error: KVStoreError | None = None
        """The first one of this step."""

    def step(self) -> None:
        """Applies news, lists some shards and reads some files. Raises the errors of etcd.

        What cannot be read on the root is tried again later, and stops nothing else: the first error is raised at the
        end.
        """
        self._error = None
        self._apply(self._doomed.news())
        began_s = now_s = self._clock.monotonic_s()
        if self._unrecorded and now_s - self._records_s >= self._limits.retry_s:
            self._read_records()
        if now_s - self._looked_s >= self._limits.step_s:
            self._looked_s = now_s
            for shard in self._folders.to_look_at(now_s):
                self._attempt(self._look, shard)
                if self._error and self._is_late(began_s):
                    break  # the root may need long for each error
        while not self._is_late(began_s) and (due := self._folders.due(self._clock.monotonic_s())) is not None:
            self._attempt(self._list, due)
        for model in list(self.models.values()):
            self._identify(model, began_s)
        if self._error:
            raise self._error

    @property
    def is_busy(self) -> bool:
        """True if another step has work to do immediately."""
        has_unknown = any(model.unknown for model in self.models.values())
        return has_unknown or self._folders.due(self._clock.monotonic_s()) is not None

    def settle(self) -> list[tuple[Model, Difference]]:
        """Returns the changes to publish since the last call, for each namespace that has any."""
        with self.lock:
            found = [(model, model.inventory.settle()) for model in self.models.values()]
        return [(model, each) for model, each in found if each.removed or each.stored]

    def close(self) -> None:
        """Ends the watches; another step begins them, and reads etcd, afresh. Idempotent."""
        self._doomed.close()

    # News

    def _apply(self, news: News) -> None:
        for shard in self._shards_of(news.ended):
            self._folders.must_list(shard)
        if news.clear_ended:
            self._folders.must_list(None)
        with self.lock:
            for model in self.models.values():
                for shard in self._shards_of(news.begun):
                    self._condemn(model, shard)
                if news.clear_begun:
                    self._hide(model)

    def _shards_of(self, sweeps: Iterable[frozenset[bytes]]) -> set[int]:
        """Returns the shards of the chunks of some sweeps."""
        return {places.shard(Address(each), self._shard_bits) for victims in sweeps for each in victims}

    def _condemn(self, model: Model, shard: int) -> None:
        """Condemns what sweeps in flight are about to take."""
        inventory = model.inventory
        inventory.condemn([each for each in inventory.present(shard) if self._doomed.condemns(each.address)])

    def _hide(self, model: Model, shard: int | None = None) -> None:
        """Condemns all that a clear of the namespace is deleting, in one shard or in all."""
        if self._doomed.hides(model.namespace.id):
            model.inventory.condemn(model.inventory.present(shard))

    # Listing

    def _is_late(self, began_s: float) -> bool:
        return self._clock.monotonic_s() - began_s >= self._limits.step_s

    def _attempt(self, act: Callable[[int], None], shard: int) -> None:
        """Does something about a shard's folder; if that fails, it stays due."""
        try:
            act(shard)
        except KVStoreError as error:
            self._folders.failed(shard, self._clock.monotonic_s())
            self._error = self._error or error

    def _look(self, shard: int) -> None:
        time = folder_time(self._root, places.shard_folder(shard))
        self._folders.looked(shard, time, self._clock.monotonic_s())

    def _list(self, shard: int) -> None:
        folder, began_s = places.shard_folder(shard), self._clock.monotonic_s()
        time = folder_time(self._root, folder)
        found = defaultdict[NamespaceId, list[Address]](list)
        for name in list_names(self._root, folder):
            parsed = places.parse_chunk(name)
            if parsed is not None and places.shard(parsed[0], self._shard_bits) == shard:
                found[parsed[1]].append(parsed[0])
        self._meet(found.keys())
        self._folders.listed(shard, time, began_s, self._clock.monotonic_s())
        with self.lock:
            for number, model in self.models.items():
                # What is here now was spared by every sweep that has ended; those in flight condemn theirs again.
                model.inventory.listed(shard, found.get(number, ()))
                self._condemn(model, shard)
                self._hide(model, shard)

    def _meet(self, found: Iterable[NamespaceId]) -> None:
        """Reads the records of namespaces that were not there before."""
        new = set(found) - self.models.keys() - self._unwanted - self._unrecorded
        if new:
            self._read_records(new)

    def _read_records(self, new: Set[NamespaceId] = frozenset()) -> None:
        """Reads the records of new namespaces, and of those that had none: another host's may show late on NFS."""
        self._records_s = self._clock.monotonic_s()
        unread, failed = new | self._unrecorded, list[KVStoreError]()
        try:
            recorded = {each.id: each for each in read_namespaces(self._root, failed) if each.id in unread}
        except KVStoreError as error:
            recorded, failed = {}, [error]
        for number, namespace in recorded.items():
            if not self._wanted(namespace):
                self._unwanted.add(number)
                continue
            with self.lock:
                self.models[number] = Model(namespace, NamespaceIndex(namespace.digest, self._shard_bits))
            if number in self._unrecorded:
                self._folders.must_list(None)  # earlier listings passed over its chunks
        self._unrecorded = unread - recorded.keys()
        if failed:
            self._error = self._error or failed[0]

    def _identify(self, model: Model, began_s: float) -> None:
        """Reads the files of some chunks that came: one at least, and no more once the step has taken its time."""
        now_s = self._clock.monotonic_s()
        with self.lock:
            if model.failed and now_s >= model.retry_s:
                model.unknown += model.failed
                model.failed = []
            model.unknown += model.inventory.unknown()
        read = list[tuple[IndexEntry, EventBlock]]()
        for _ in range(min(FILES_MAX, len(model.unknown))):
            entry = model.unknown.popleft()
            if not entry.is_present:
                continue
            try:
                block = read_block(self._root, self._shard_bits, model.namespace, entry.address)
                read += [] if block is None else [(entry, block)]
            except (KVStoreError, Damaged) as error:
                if not isinstance(error, Damaged):  # another file may take its name before the next listing
                    self._error = self._error or error
                if not model.failed:
                    model.retry_s = now_s + self._limits.retry_s
                model.failed.append(entry)
            if self._is_late(began_s):
                break
        with self.lock:
            for entry, block in read:
                model.inventory.learn(entry, block)
