"""The index of a publisher: which chunks there are, and which of them are about to be deleted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.census.selection import ClearOrder
from kvstore.census.walk import Fixed, read_fixed
from kvstore.core.address import ADDRESS_BYTES, NO_PARENT, Address, block_address, chunk_address, token_array
from kvstore.core.clock import Clock
from kvstore.core.namespace import Namespace, NamespaceId
from kvstore.core.validate import parse_json
from kvstore.errors import InvalidRequest, KVStoreError, RootMismatch
from kvstore.events.columns import BlockName, EventOrigin, Rows
from kvstore.events.inventory import KEY_MAX, BlockPart, Difference, Identities, MultipartBlocks, NamespaceIndex
from kvstore.events.limits import EventLimits
from kvstore.format import places
from kvstore.format.header import (
    FIXED_BYTES,
    NO_WHOLE,
    PAGE_BYTES,
    VERSION_2,
    Damaged,
    Descent,
    IdentityKind,
    decode_any,
)
from kvstore.format.places import Name, NameColumns, parse_names
from kvstore.meta.keys import Keys
from kvstore.meta.store import KeyValue, MetadataStore, Watch, WatchLost
from kvstore.meta.sweeps import Condemned, CondemnedSet
from kvstore.root.identity import read_namespaces
from kvstore.root.interface import Root
from kvstore.root.posix import folder_time, list_names

# Which shards have to be listed, and when: decided from the times of their folders. Pure: no I/O, no clock.
#
# A listing may miss a change within the file system's clock tick in which it starts. So a folder is listed
# immediately when its time changes, and once more when that time has stood for ``settle_s`` by our own clock.


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
        self._next = 0
        self._credit_s = BURST_S
        self._counted_s = NEVER_S
        self.has_times = True
        """False if the root's folders have no times."""

    @property
    def count(self) -> int:
        """Number of shards."""
        return len(self._times)

    @property
    def is_complete(self) -> bool:
        """True once every shard was listed."""
        return bool((self._listed_s > NEVER_S).all())

    def to_look_at(self) -> list[int]:
        """Returns the shards whose folders are to be looked at now, in turns if there are many."""
        if not self.has_times:
            return []
        count = min(self.count, self._limits.folders_max)
        chosen = [(self._next + at) % self.count for at in range(count)]
        self._next = (self._next + count) % self.count
        return chosen

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
        """Returns the shard to list now, the one that waits longest; None if there is none."""
        urgent = np.flatnonzero(self._must)
        if len(urgent):
            return int(urgent[self._listed_s[urgent].argmin()])
        if self._credit(now_s) <= 0:
            return None
        is_due = now_s - self._listed_s >= self._limits.relist_s
        if self.has_times:
            settled_s = self._since_s + self._limits.settle_s
            is_due &= (self._times != self._listed_times) | ((self._listed_s < settled_s) & (now_s >= settled_s))
        found = np.flatnonzero(is_due)
        return int(found[self._listed_s[found].argmin()]) if len(found) else None

    def listed(self, shard: int, time: int | None, began_s: float, ended_s: float) -> None:
        """Notes a whole listing; ``time`` is the folder's before it began."""
        self._listed_s[shard], self._must[shard] = began_s, False
        if time is not None:
            self.looked(shard, time, began_s)
            self._listed_times[shard] = time
        self._credit_s = self._credit(ended_s) - (ended_s - began_s)

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

    begun: set[int] = field(default_factory=set)
    """Shards that a sweep has condemned chunks of."""
    ended: set[int] = field(default_factory=set)
    """Shards whose sweep is over: list them."""
    clear_begun: bool = False
    clear_ended: bool = False
    """A clear is over: list everything."""


class PendingDeletions:
    """Follows the keys of sweeps and of clears that delete. Used by one thread."""

    def __init__(self, meta: MetadataStore, keys: Keys, limits: EventLimits) -> None:
        self._meta = meta
        self._keys = keys
        self._limits = limits
        self._sweeps: dict[int, tuple[bytes, CondemnedSet | None]] = {}
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

    def condemned(self, shard: int) -> CondemnedSet | None:
        """Returns what the sweep of a shard condemns; None if there is none."""
        found = self._sweeps.get(shard)
        return None if found is None else found[1]

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
            before = {self._keys.condemned_in(shard) for shard in self._sweeps}
        else:
            before = set(self._clears)
        for gone in before - there:
            self._apply_key(gone, None, news)
        for kv in snapshot.items:
            self._apply_key(kv.key, kv, news)
        return watch

    def _apply_key(self, key: str, kv: KeyValue | None, news: News) -> None:
        shard = self._keys.parse_condemned(key)
        if shard is not None:
            self._apply_sweep(shard, kv, news)
        elif key.startswith(self._keys.clearing):
            self._apply_clear(key, kv, news)

    def _apply_sweep(self, shard: int, kv: KeyValue | None, news: News) -> None:
        before = self._sweeps.pop(shard, None)
        if kv is not None:
            try:
                members = CondemnedSet(Condemned.from_bytes(kv.value))
            except RootMismatch as error:
                log.warning("events.sweep_unreadable shard=%04x %s", shard, error)
                members = None
            self._sweeps[shard] = (kv.value, members)
            news.begun.add(shard)
        if before is not None and (kv is None or kv.value != before[0]):
            news.ended.add(shard)

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


LORA_NAME_MAX = 256
EXTRA_KEYS_MAX = 64
"""Extra keys of one block."""


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """One block: its identity, packed as those of chunks are, and its name."""

    packed: bytes
    """Address, parent's address, depth as u32 and tokens."""
    name: BlockName


def claimed_of(namespace: Namespace, address: Address, prefix: bytes) -> BlockHeader | None:
    """Returns what a file that begins with ``prefix`` says; None if it is not this block, or cannot be published."""
    try:
        header = decode_any(prefix)
    except Damaged:
        return None
    if header.kind is not IdentityKind.BLOCK or (header.address, header.namespace) != (address, namespace.digest):
        return None
    descent = Descent.unpack(header.descent)
    key = header.identity
    if descent is None or not key or block_address(namespace, key) != address or descent.hash_bytes > len(key):
        return None
    name = _name(key, descent)
    if name is None or len(descent.tokens) != namespace.layout.chunk_tokens:
        return None
    parent = block_address(namespace, descent.parent) if descent.parent else NO_PARENT
    tokens = token_array(descent.tokens).tobytes()
    return BlockHeader(address + parent + descent.depth.to_bytes(4, "little") + tokens, name)


def _name(key: bytes, descent: Descent) -> BlockName | None:
    """Returns a block's name; None if its extras are not what routers understand."""
    try:
        extra = parse_json(descent.extra or b"{}")
    except ValueError:
        return None
    if not isinstance(extra, dict):
        return None
    lora_name = extra.get("lora_name")
    if not (lora_name is None or _is_text(lora_name, LORA_NAME_MAX)):
        return None
    keys = extra.get("extra_keys")
    if keys is not None and not (
        isinstance(keys, list) and 0 < len(keys) <= EXTRA_KEYS_MAX and all(map(_is_key, keys))
    ):
        return None
    if (descent.parts > 1) != (descent.whole != NO_WHOLE):
        return None
    origin = EventOrigin(descent.group, lora_name, descent.parts, descent.whole)
    shared = None if keys is None else tuple(tuple(key) if isinstance(key, list) else key for key in keys)
    return BlockName(key, descent.hash_bytes, origin, shared)


def _is_key(value: Any) -> bool:
    """True for what extra keys of vLLM are: texts, numbers, and pairs of these."""
    if isinstance(value, list):
        return 0 < len(value) <= EXTRA_KEYS_MAX and all(map(_is_plain, value))
    return _is_plain(value)


def _is_plain(value: Any) -> bool:
    return value is None or _is_number(value) or _is_text(value)


def _is_number(value: Any) -> bool:
    """True for an integer that msgpack can encode."""
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 64


def _is_text(value: Any, size_max: int = 1 << 10) -> bool:
    """True for a text that is not too long and that UTF-8 can encode: JSON may escape half of a surrogate pair."""
    if not isinstance(value, str) or len(value) > size_max:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


# Identities of chunks, read from their files: parent, depth and tokens. Each once, while the file is there.
#
# Of a chunk of tokens nothing is believed that its address does not prove: it is the hash of parent and tokens. A
# block's address proves its key alone; the rest is what its writer says (``Descent``).


ROWS_MAX = 512
"""Files read between two looks for news."""


@dataclass(frozen=True, slots=True)
class Read:
    """One pass over some files."""

    found: Identities
    blocks: Identities
    odd: Rows
    """Their files do not match their names, or cannot be published: encrypted or corrupt files, and blocks without a
    descent."""
    failed: Rows
    """The root did not answer: read them again."""


def read_identities(root: Root, shard_bits: int, namespace: Namespace, inventory: NamespaceIndex, rows: Rows) -> Read:
    """Reads the files of ``rows``; those that are gone are in no part of the answer."""
    packed, blocks, odd, failed = list[bytes](), list[BlockHeader](), [], []
    for row, raw in zip(rows.tolist(), inventory.rows.addresses(rows), strict=True):
        address = Address(raw.tobytes())
        try:
            seen = _seen(root, places.chunk(address, namespace.id, shard_bits), namespace)
        except KVStoreError:
            failed.append(row)
            continue
        if seen is None:
            continue
        prefix, fixed = seen
        if fixed is not None and fixed.kind is IdentityKind.BLOCK:
            claimed = claimed_of(namespace, address, prefix)
            blocks += [claimed] if claimed is not None else []
            odd += [row] if claimed is None else []
        elif fixed is not None and (identity := _identity(namespace, address, fixed, prefix)) is not None:
            packed.append(address + identity)
        else:
            odd.append(row)
    size = namespace.layout.chunk_tokens
    named = unpack([each.packed for each in blocks], size, [each.name for each in blocks])
    return Read(unpack(packed, size), named, np.array(odd, np.int32), np.array(failed, np.int32))


def _seen(root: Root, name: Name, namespace: Namespace) -> tuple[bytes, Fixed | None] | None:
    """Returns the first bytes of a file, at least what identifies a chunk and a block's header; None: there is none."""
    size = max(FIXED_BYTES + 4 * namespace.layout.chunk_tokens, PAGE_BYTES)
    seen = root.look(name, size)
    if seen is None:
        return None
    fixed = read_fixed(seen.prefix)
    if fixed is not None and fixed.kind is IdentityKind.BLOCK and fixed.version == VERSION_2 and size < 2 * PAGE_BYTES:
        seen = root.look(name, 2 * PAGE_BYTES)
    return None if seen is None else (seen.prefix, fixed)


def _identity(namespace: Namespace, address: Address, fixed: Fixed, prefix: bytes) -> bytes | None:
    """Returns parent, depth and tokens, packed; None if the address is not theirs."""
    size = 4 * namespace.layout.chunk_tokens
    tokens = prefix[FIXED_BYTES : FIXED_BYTES + size]
    if len(tokens) != size or chunk_address(namespace.digest, fixed.parent, tokens) != address:
        return None
    is_first = fixed.parent == NO_PARENT
    if is_first != (fixed.depth == 0):
        return None
    return fixed.parent + fixed.depth.to_bytes(4, "little") + tokens


def unpack(packed: list[bytes], chunk_tokens: int, names: Sequence[BlockName] = ()) -> Identities:
    """Makes columns of packed identities: address, parent, depth and tokens of each; ``names`` are those of blocks."""
    kind = np.dtype(
        [
            ("address", ">u8", 2),
            ("parent", ">u8", 2),
            ("depth", "<u4"),
            ("tokens", "<u4", (chunk_tokens,)),
        ]
    )
    assert kind.itemsize == 2 * ADDRESS_BYTES + 4 + 4 * chunk_tokens
    lines = np.frombuffer(b"".join(packed), kind)
    address, parent = lines["address"].astype(np.uint64), lines["parent"].astype(np.uint64)
    return Identities(
        address[:, 0],
        address[:, 1],
        parent[:, 0],
        parent[:, 1],
        lines["depth"],
        lines["tokens"].astype(np.uint32),
        names,
    )


# The chunks that the root holds, and those about to be deleted, for all published namespaces; updated in steps.
#
# The order of a step matters. Condemned chunks are retracted first, because the promise for removals is the
# shortest. A shard is listed after the index has learned that its sweep ended, so what the listing finds was spared.


STRANGERS_S = 10.0
"""Interval at which the records of unpublished namespaces are read again."""

Wanted = Callable[[Namespace], bool]


@dataclass(slots=True)
class Model:
    """One namespace and its inventory."""

    namespace: Namespace
    inventory: NamespaceIndex
    unknown: Rows
    """Rows whose files are still to be read."""


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
        folder: str | None = None,
    ) -> None:
        """``wanted`` selects the published namespaces; ``folder`` is where their tokens are stored."""
        self.lock = threading.Condition()
        self.models: dict[int, Model] = {}
        """By namespace id, as a number."""
        self._root = root
        self._shard_bits = shard_bits
        self._doomed = doomed
        self._wanted = wanted
        self._limits = limits
        self._clock = clock
        self._folder = folder
        self._folders = ListingScheduler(1 << shard_bits, limits)
        self._wholes = MultipartBlocks()
        self._looked_s = float("-inf")
        self._strangers: set[int] = set()
        """Namespaces that are not wanted, or had no readable record a moment ago."""
        self._strangers_s = 0.0
        self._quarantined: set[str] = set()

    @property
    def is_complete(self) -> bool:
        """True once all that was there at the start is known."""
        return self._folders.is_complete and not any(len(model.unknown) for model in self.models.values())

    def step(self) -> None:
        """Applies news, lists some shards and reads some files. Raises the errors of root and etcd."""
        self._apply(self._doomed.news())
        began_s = now_s = self._clock.monotonic_s()
        if now_s - self._looked_s >= self._limits.step_s:
            self._looked_s = now_s
            self._look_at_quarantine()
            for shard in self._folders.to_look_at():
                self._folders.looked(shard, folder_time(self._root, places.shard_folder(shard)), now_s)
        listed: dict[int, list[str]] = {}
        try:
            while now_s - began_s < self._limits.step_s and (due := self._folders.due(now_s)) is not None:
                listed[due] = self._list(due)
                now_s = self._clock.monotonic_s()
        finally:
            if listed:
                self._apply_listed(listed)
        for model in list(self.models.values()):
            self._identify(model)

    @property
    def is_busy(self) -> bool:
        """True if another step has work to do immediately."""
        return self._folders.due(self._clock.monotonic_s()) is not None or not self.is_complete

    def reread(self) -> None:
        """Reads etcd afresh at the next step: it may be another one than before, restored from a snapshot."""
        self._doomed.close()

    def settle(self) -> list[tuple[Model, Difference]]:
        """Returns the changes to publish since the last call, for each namespace that has any."""
        found = []
        with self.lock:
            parts = {number: BlockPart(each.namespace, each.inventory) for number, each in self.models.items()}
            self._wholes.judge(parts)
            for model in self.models.values():
                difference = model.inventory.settle()
                if len(difference.removed) or len(difference.stored):
                    found.append((model, difference))
        return found

    def compact(self) -> None:
        """Gives memory back where much is no longer there. Rows change: call it when no difference is in use."""
        with self.lock:
            for model in self.models.values():
                if not len(model.unknown):
                    model.inventory.compact()

    def close(self) -> None:
        """Ends the watches, and gives files back. Idempotent."""
        self._doomed.close()
        with self.lock:
            for model in self.models.values():
                model.inventory.close()
            self.models = {}

    # News

    def _apply(self, news: News) -> None:
        for shard in news.ended:
            self._folders.must_list(shard)
        if news.clear_ended:
            self._folders.must_list(None)
        with self.lock:
            for shard in news.begun:
                self._condemn(shard)
            if news.clear_begun:
                for number in self.models:
                    self._hide(number)

    def _condemn(self, shard: int) -> None:
        """Condemns what a sweep in flight is about to take."""
        members = self._doomed.condemned(shard)
        if members is None:
            return
        for model in self.models.values():
            rows = model.inventory.between(*self._range(shard))
            if len(rows):
                addresses = model.inventory.rows.addresses(rows)
                model.inventory.condemn(rows[np.array([each.tobytes() in members for each in addresses], np.bool_)])

    def _hide(self, number: int) -> None:
        """Condemns all of a namespace that a clear is deleting."""
        if self._doomed.hides(number.to_bytes(8, "big")):
            inventory = self.models[number].inventory
            inventory.condemn(inventory.between(0, KEY_MAX))

    def _look_at_quarantine(self) -> None:
        """Takes back chunks that were set aside as damaged, unless they are there again."""
        names = set(list_names(self._root, places.QUARANTINE))
        new, self._quarantined = names - self._quarantined, names
        for name in new:
            address = places.parse_quarantined(name)
            if address is None:
                continue
            first = np.array([int.from_bytes(address[:8], "big")], np.uint64)
            for model in self.models.values():
                chunk = places.chunk(address, model.namespace.id, self._shard_bits)
                if self._root.stat(chunk) is None:
                    with self.lock:
                        model.inventory.left(first)

    # Listing

    def _list(self, shard: int) -> list[str]:
        """Returns the names in a shard's folder."""
        folder, began_s = places.shard_folder(shard), self._clock.monotonic_s()
        time = folder_time(self._root, folder)
        names = list_names(self._root, folder)
        self._folders.listed(shard, time, began_s, self._clock.monotonic_s())
        return names

    def _apply_listed(self, listed: Mapping[int, list[str]]) -> None:
        """Records the listings of many shards together: each alone would cost as much."""
        found = parse_names([name for names in listed.values() for name in names])
        try:
            self._meet(found)
        except KVStoreError:
            for shard in listed:
                self._folders.must_list(shard)
            raise
        folders = np.repeat(np.array(list(listed), np.uint64), [len(names) for names in listed.values()])[found.ours]
        in_place = folders == found.firsts >> np.uint64(64 - self._shard_bits)
        ranges = [self._range(shard) for shard in listed]
        with self.lock:
            for number, model in self.models.items():
                mine = in_place & (found.namespaces == np.uint64(number))
                # What is here now was spared by every sweep that has ended; those in flight condemn theirs again.
                model.inventory.listed(ranges, found.firsts[mine], found.lasts[mine])
            for shard in listed:
                self._condemn(shard)
            for number in self.models:
                self._hide(number)

    def _meet(self, found: NameColumns) -> None:
        """Reads the records of namespaces that were not there before."""
        now_s = self._clock.monotonic_s()
        if now_s - self._strangers_s >= STRANGERS_S:
            self._strangers, self._strangers_s = set(), now_s
        new = set(np.unique(found.namespaces).tolist()) - self.models.keys() - self._strangers
        if not new:
            return
        for namespace in read_namespaces(self._root):
            number = int.from_bytes(namespace.id, "big")
            if number in new and self._wanted(namespace):
                inventory = NamespaceIndex(namespace.layout.chunk_tokens, self._folder, namespace.digest)
                with self.lock:
                    self.models[number] = Model(namespace, inventory, np.zeros(0, np.int32))
        self._strangers |= new - self.models.keys()

    def _identify(self, model: Model) -> None:
        """Reads the files of some chunks that came."""
        with self.lock:
            rows = np.unique(np.concatenate([model.unknown, model.inventory.unknown()]))
        now, model.unknown = rows[:ROWS_MAX], rows[ROWS_MAX:]
        if not len(now):
            return
        read = read_identities(self._root, self._shard_bits, model.namespace, model.inventory, now)
        with self.lock:
            model.inventory.learn(read.found)
            model.inventory.learn(read.blocks)
            model.inventory.refuse(read.odd)
            model.inventory.retry(read.failed)

    def _range(self, shard: int) -> tuple[int, int]:
        """Returns the first and the last number that 8 bytes of an address in this shard can begin with."""
        shift = 64 - self._shard_bits
        return shard << shift, ((shard + 1) << shift) - 1
