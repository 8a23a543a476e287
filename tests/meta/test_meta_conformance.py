"""The contract of all metadata stores, in memory and in a real etcd, and that the two agree on any history."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.meta.embedded_etcd import EmbeddedEtcd
from kvstore.meta.etcd import EtcdMetadata
from kvstore.meta.memory import MemoryMetadata
from kvstore.meta.store import Absent, Compare, Delete, ModifiedAt, Put, ValueIs
from kvstore.testing import MetadataClients, MetadataStoreTests
from kvstore.testing.metadata import take
from tests.kit.etcd import PATIENCE_S, running_etcd
from tests.meta.conftest import KINDS, clients


class TestMetadataStores(MetadataStoreTests):
    @pytest.fixture(params=KINDS)
    def store(self, request: pytest.FixtureRequest) -> Iterator[MetadataClients]:
        yield from clients(request)


KEYS = st.sampled_from("abc")
VALUES = st.sampled_from([b"", b"1", b"2"])
COMPARES = st.one_of(
    st.builds(Absent, KEYS), st.builds(ValueIs, KEYS, VALUES), st.builds(ModifiedAt, KEYS, st.integers(1, 12))
)
OPERATIONS = st.lists(
    st.one_of(st.builds(Put, KEYS, VALUES), st.builds(Delete, KEYS)), max_size=3, unique_by=lambda each: each.key
)


@pytest.fixture(scope="module")
def quiet_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    """An etcd whose revisions nobody else moves: leases of other tests end when they like."""
    with running_etcd(tmp_path_factory.mktemp("quiet-etcd")) as server:
        yield server


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.lists(COMPARES, max_size=2), OPERATIONS), max_size=12))
def test_memory_and_etcd_agree_on_any_history(
    quiet_etcd: EmbeddedEtcd, steps: list[tuple[list[Compare], list[Put | Delete]]]
) -> None:
    memory, etcd = MemoryMetadata(), EtcdMetadata(quiet_etcd.endpoints, timeout_s=PATIENCE_S)
    prefix = "/agree/"
    try:
        etcd.txn((), [Delete(prefix + name) for name in "abc"])
        offset = etcd.list(prefix).revision - memory.list(prefix).revision
        for compares, operations in steps:
            results = []
            for meta, shift in ((memory, 0), (etcd, offset)):
                moved: list[Compare] = [
                    ModifiedAt(prefix + each.key, each.mod_revision + shift)
                    if isinstance(each, ModifiedAt)
                    else (
                        Absent(prefix + each.key)
                        if isinstance(each, Absent)
                        else ValueIs(prefix + each.key, each.value)
                    )
                    for each in compares
                ]
                placed: list[Put | Delete] = [
                    Put(prefix + each.key, each.value) if isinstance(each, Put) else Delete(prefix + each.key)
                    for each in operations
                ]
                result = meta.txn(moved, placed)
                snapshot = meta.list(prefix)
                items = [
                    (kv.key, kv.value, kv.create_revision - shift, kv.mod_revision - shift) for kv in snapshot.items
                ]
                results.append((result.succeeded, result.revision - shift, items, snapshot.revision - shift))
            assert results[0] == results[1]
        start = memory.list(prefix).revision
        expected = memory.watch(prefix, 2).next(0) or () if start > 1 else ()
        watch = etcd.watch(prefix, 2 + offset)
        seen = take(watch, len(expected)) if expected else []
        assert [(e.key, e.kv and e.kv.value, e.revision) for e in expected] == [
            (e.key, e.kv and e.kv.value, e.revision - offset) for e in seen
        ]
    finally:
        etcd.close()
        memory.close()
