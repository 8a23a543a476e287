"""An empty metadata store learns from the root which namespaces there are."""

from __future__ import annotations

from kvstore.format import places
from kvstore.fsck import adopt
from kvstore.layout import Layout
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMeta
from kvstore.meta.memory_store import MemoryStore
from kvstore.meta.namespaces import Namespaces
from kvstore.namespace import Namespace
from kvstore.root.memory import MemoryRoot
from kvstore.sources import SystemClock
from tests.fsck.damage import LAYOUT, fill, write


def empty_meta() -> MemoryMeta:
    return MemoryMeta(MemoryStore(SystemClock()))


def test_every_namespace_of_the_root_is_recorded_once() -> None:
    filled = fill(MemoryRoot(), 1, "one")
    fill(filled.root, 1, "two")
    meta = empty_meta()
    adopted = adopt(filled.root, filled.identity, meta)
    assert (adopted.added_count, adopted.known_count, adopted.refused) == (2, 0, ())
    known = Namespaces(meta, Keys(filled.identity.root)).list()
    assert {namespace.name for namespace in known} == {"one", "two"}
    assert filled.namespace.digest in {namespace.digest for namespace in known}
    adopted = adopt(filled.root, filled.identity, meta)
    assert (adopted.added_count, adopted.known_count, adopted.refused) == (0, 2, ())


def test_unreadable_and_misnamed_records_are_left_out_and_named() -> None:
    filled = fill(MemoryRoot(), 0)
    other = Namespace.of("other", LAYOUT)
    write(filled.root, places.namespace_record(other.digest), filled.namespace.to_json())
    third = Namespace.of("third", LAYOUT)
    write(filled.root, places.namespace_record(third.digest), b"{}")
    adopted = adopt(filled.root, filled.identity, empty_meta())
    assert adopted.added_count == 1
    assert sorted(line.partition(":")[0] for line in adopted.refused) == sorted(
        [places.namespace_record(other.digest), places.namespace_record(third.digest)]
    )


def test_of_two_layouts_under_one_name_the_one_that_the_root_claims_is_kept() -> None:
    filled = fill(MemoryRoot(), 0, "model")
    for chunk_tokens in range(5, 12):
        rival = Namespace.of("model", Layout(layers=1, kv_heads=1, head_dim=1, chunk_tokens=chunk_tokens))
        write(filled.root, places.namespace_record(rival.digest), rival.to_json())
    meta = empty_meta()
    adopted = adopt(filled.root, filled.identity, meta)
    assert adopted.added_count == 1 and len(adopted.refused) == 7
    assert [namespace.digest for namespace in Namespaces(meta, Keys(filled.identity.root)).list()] == [
        filled.namespace.digest
    ]
