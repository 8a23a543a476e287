"""The contract of all metadata stores. Tests are named after the sentences of ``kvstore/meta/store.py``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kvstore.core.clock import Clock
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.meta.keys import Keys
from kvstore.meta.store import (
    OPERATIONS_MAX,
    REQUEST_BYTES_MAX,
    Absent,
    Compare,
    Delete,
    Event,
    LeaseGone,
    LeaseId,
    MetadataStore,
    ModifiedAt,
    Put,
    ValueIs,
    Watch,
    WatchLost,
)

PATIENCE_S = 30.0


@dataclass(frozen=True)
class MetadataClients:
    """A store as two of its clients see it. ``pass_time`` ends leases of that many seconds."""

    meta: MetadataStore
    other: MetadataStore
    compact: Callable[[int], None]
    pass_time: Callable[[float], None]
    clock: Clock
    prefix: str
    keys: Keys


def take(watch: Watch, events_count: int) -> list[Event]:
    """The next ``events_count`` events."""
    found: list[Event] = []
    while len(found) < events_count:
        batch = watch.next(PATIENCE_S)
        assert batch, f"only {len(found)} of {events_count} events came"
        found += batch
    return found


class MetadataStoreTests:
    """Override ``store``. Each test has a fresh prefix."""

    @pytest.fixture
    def store(self) -> MetadataClients:
        """A store as two of its clients see it."""
        raise NotImplementedError

    def test_put_and_delete_are_seen_by_every_client(self, store: MetadataClients) -> None:
        key = store.prefix + "a"
        assert store.meta.get(key) is None
        first, second = store.meta.put(key, b"1"), store.meta.put(key, b"2")
        found = store.other.get(key)
        assert found is not None
        assert (found.value, found.create_revision, found.mod_revision, found.lease) == (b"2", first, second, 0)
        assert second > first
        assert store.other.delete(key)
        assert not store.meta.delete(key)
        store.meta.put(key, b"1")
        found = store.meta.get(key)
        assert found is not None and found.create_revision > second

    def test_list_is_sorted_and_has_only_the_prefix(self, store: MetadataClients) -> None:
        for name in ("b/2", "b/10", "a", "b", "c/1", "b/é"):
            store.meta.put(store.prefix + name, name.encode())
        snapshot = store.meta.list(store.prefix + "b/")
        assert [kv.key.removeprefix(store.prefix) for kv in snapshot.items] == ["b/10", "b/2", "b/é"]
        assert store.meta.count(store.prefix + "b/") == 3
        assert snapshot.revision == max(kv.mod_revision for kv in store.meta.list(store.prefix).items)
        assert store.meta.list(store.prefix + "nothing").items == () and store.meta.count(store.prefix + "nothing") == 0

    def test_list_has_all_keys_small_and_large(self, store: MetadataClients) -> None:
        sizes = {f"{number:04}": 200_000 if number % 50 == 7 else 10 for number in range(500)}
        for start in range(0, 500, 100):
            names = list(sizes)[start : start + 100]
            store.meta.txn((), [Put(f"{store.prefix}{name}", name.encode() * (sizes[name] // 4)) for name in names])
        snapshot = store.meta.list(store.prefix)
        assert [(kv.key.removeprefix(store.prefix), len(kv.value) // 4) for kv in snapshot.items] == [
            (name, size // 4) for name, size in sizes.items()
        ]

    def test_transaction_applies_all_or_nothing(self, store: MetadataClients) -> None:
        key, absent = store.prefix + "a", store.prefix + "none"
        revision = store.meta.put(key, b"1")
        store.meta.put(store.prefix + "old", b"x")
        operations = (Put(store.prefix + "b", b"b"), Put(store.prefix + "c", b"c"), Delete(store.prefix + "old"))
        holds: list[Compare] = [Absent(absent), ModifiedAt(key, revision), ValueIs(key, b"1")]
        fails: list[Compare] = [
            Absent(key),
            ModifiedAt(key, revision + 1),
            ModifiedAt(absent, revision),
            ValueIs(key, b"2"),
            ValueIs(absent, b""),
        ]
        for compare in fails:
            result = store.meta.txn((*holds, compare), operations)
            assert not result.succeeded
            assert store.other.get(store.prefix + "b") is None
        result = store.meta.txn(holds, operations)
        assert result.succeeded
        found = {kv.key.removeprefix(store.prefix): kv.mod_revision for kv in store.other.list(store.prefix).items}
        assert found == {"a": revision, "b": result.revision, "c": result.revision}
        nothing = store.meta.txn((), (Delete(absent),))
        assert nothing.succeeded and nothing.revision == result.revision, "what changes nothing makes no revision"

    def test_request_over_a_limit_is_invalid(self, store: MetadataClients) -> None:
        key = store.prefix + "a"
        many = [Put(f"{store.prefix}{number}", b"") for number in range(OPERATIONS_MAX + 1)]
        store.meta.put(key, bytes(REQUEST_BYTES_MAX - len(key)))
        store.meta.txn((), many[:OPERATIONS_MAX])
        with pytest.raises(InvalidRequest, match="over the limit"):
            store.meta.put(key, bytes(REQUEST_BYTES_MAX))
        with pytest.raises(InvalidRequest, match="split it"):
            store.meta.txn((), many)
        with pytest.raises(InvalidRequest, match="twice"):
            store.meta.txn((), (Put(key, b""), Delete(key)))
        with pytest.raises(InvalidRequest, match="0 bytes"):
            store.meta.get("")
        with pytest.raises(InvalidRequest, match="ttl_s"):
            store.meta.grant(0)
        with pytest.raises(InvalidRequest, match="from_revision"):
            store.meta.watch(store.prefix, 0)

    def test_revoked_lease_deletes_its_keys(self, store: MetadataClients) -> None:
        lease = store.meta.grant(60)
        store.meta.put(store.prefix + "a", b"1", lease)
        store.meta.txn((), (Put(store.prefix + "b", b"1", lease), Put(store.prefix + "c", b"1", lease)))
        store.meta.put(store.prefix + "c", b"2")  # put again without a lease: stays
        found = store.other.get(store.prefix + "a")
        assert found is not None and found.lease == lease
        assert store.other.keep_alive(lease)
        watch = store.meta.watch(store.prefix, store.meta.list(store.prefix).revision + 1)
        store.meta.revoke(lease)
        store.meta.revoke(lease)
        assert not store.meta.keep_alive(lease)
        assert [kv.key for kv in store.other.list(store.prefix).items] == [store.prefix + "c"]
        events = take(watch, 2)
        assert {event.key for event in events} == {store.prefix + "a", store.prefix + "b"}
        assert {event.kv for event in events} == {None}
        assert len({event.revision for event in events}) == 1

    def test_lease_without_keepalives_ends(self, store: MetadataClients) -> None:
        lease = store.meta.grant(2)
        revision = store.meta.put(store.prefix + "a", b"1", lease)
        watch = store.meta.watch(store.prefix, revision + 1)
        store.pass_time(2)
        assert take(watch, 1)[0].kv is None
        assert store.meta.get(store.prefix + "a") is None
        assert not store.other.keep_alive(lease)

    def test_put_under_an_ended_lease_writes_nothing(self, store: MetadataClients) -> None:
        lease = store.meta.grant(60)
        store.meta.revoke(lease)
        for gone in (lease, LeaseId(424242)):
            with pytest.raises(LeaseGone):
                store.meta.put(store.prefix + "a", b"1", gone)
            with pytest.raises(LeaseGone):
                store.meta.txn((), (Put(store.prefix + "b", b"1"), Put(store.prefix + "a", b"1", gone)))
        assert store.meta.list(store.prefix).items == ()

    def test_watch_replays_the_past_and_continues_in_order(self, store: MetadataClients) -> None:
        start = store.meta.put(store.prefix + "w/a", b"0")
        store.meta.put(store.prefix + "elsewhere", b"x")
        store.meta.delete(store.prefix + "w/a")
        watch = store.other.watch(store.prefix + "w/", start)
        past = take(watch, 2)
        assert [(event.kv.value if event.kv else None) for event in past] == [b"0", None]
        for number in range(10):
            store.meta.put(store.prefix + "w/a", b"%d" % number)
        events = take(watch, 10)
        assert [event.kv.value for event in events if event.kv] == [b"%d" % number for number in range(10)]
        revisions = [event.revision for event in past + events]
        assert revisions == sorted(set(revisions))
        assert all(event.kv.mod_revision == event.revision for event in events if event.kv)
        assert watch.next(0.0) is None

    def test_watch_never_splits_a_revision(self, store: MetadataClients) -> None:
        start = store.meta.list(store.prefix).revision + 1
        watch = store.other.watch(store.prefix, start)
        for _ in range(5):
            store.meta.txn((), [Put(f"{store.prefix}{number}", bytes(10_000)) for number in range(100)])
        seen_count = 0
        while seen_count < 500:
            batch = watch.next(PATIENCE_S)
            assert batch is not None and len(batch) % 100 == 0
            seen_count += len(batch)

    def test_watch_from_before_a_compaction_is_lost(self, store: MetadataClients) -> None:
        start = store.meta.put(store.prefix + "a", b"1")
        store.meta.put(store.prefix + "a", b"2")
        store.compact(store.meta.put(store.prefix + "a", b"3"))
        with pytest.raises(WatchLost, match="compacted"):
            store.meta.watch(store.prefix, start).next(PATIENCE_S)
        fresh = store.meta.watch(store.prefix, store.meta.list(store.prefix).revision + 1)
        store.meta.put(store.prefix + "a", b"new")
        assert [event.kv.value for event in take(fresh, 1) if event.kv] == [b"new"]

    def test_closing_a_watch_wakes_its_reader(self, store: MetadataClients) -> None:
        watch = store.meta.watch(store.prefix, 1_000_000)
        seen: list[BaseException] = []

        def wait() -> None:
            try:
                watch.next(PATIENCE_S)
            except WatchLost as lost:
                seen.append(lost)

        thread = threading.Thread(target=wait)
        thread.start()
        watch.close()
        watch.close()
        thread.join(PATIENCE_S)
        assert len(seen) == 1
        with pytest.raises(WatchLost, match="closed"):
            watch.next(0)

    def test_closed_client_is_unavailable(self, store: MetadataClients) -> None:
        watch = store.other.watch(store.prefix, 1_000_000)
        store.other.close()
        store.other.close()
        with pytest.raises(Unavailable, match="closed"):
            store.other.get(store.prefix + "a")
        with pytest.raises(WatchLost, match="closed"):
            watch.next(PATIENCE_S)
        store.meta.put(store.prefix + "a", b"the store goes on")

    def test_racing_compare_and_set_loses_no_update(self, store: MetadataClients) -> None:
        key = store.prefix + "counter"
        store.meta.put(key, b"0")
        before = store.meta.operations_count

        def count(meta: MetadataStore) -> None:
            done_count = 0
            while done_count < 20:
                found = meta.get(key)
                assert found is not None
                new = b"%d" % (int(found.value) + 1)
                done_count += meta.txn((ModifiedAt(key, found.mod_revision),), (Put(key, new),)).succeeded

        threads = [threading.Thread(target=count, args=(meta,)) for meta in (store.meta, store.other) * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        found = store.meta.get(key)
        assert found is not None and found.value == b"80"
        assert store.meta.operations_count - before >= 80
