"""The match benchmark: its answers are checked, and what it counts is counted by etcd itself."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

import kvstore
from benchmarks import caching, matching
from benchmarks.contents import WrongBytes
from kvstore.client.cache import Cache
from kvstore.format import places
from tests.benchmarks.sizes import tiny_options
from tests.kit.etcd import running_etcd


def test_a_wrong_answer_ends_the_benchmark(tmp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Cache.match
    monkeypatch.setattr(Cache, "match", lambda self, tokens: max(0, real(self, tokens) - 256))
    with pytest.raises(WrongBytes, match="tokens matched: 768 of 1024"):
        matching.latency(tmp_root, 256, 1024, 0)


def test_others_chunks_lie_where_chunks_lie(tmp_root: Path) -> None:
    matching.fill(tmp_root, 256, 20)
    matching.fill(tmp_root, 256, 50)
    found = caching.files(tmp_root / places.CHUNKS)
    assert len(found) == 50
    assert all(places.parse_chunk(path.name) is not None for path in found)


@pytest.mark.slow
def test_etcd_counts_what_it_is_asked_for(tmp_root: Path) -> None:
    with running_etcd(tmp_root / "etcd") as etcd:
        before = matching._counted(etcd.endpoints)
        with kvstore.open(str(tmp_root / "root"), etcd=etcd.endpoints) as store:
            store.namespace("one", matching._layout(256))
        assert matching._counted(etcd.endpoints) > before


@pytest.mark.slow
def test_all_tables_are_filled(tmp_root: Path) -> None:
    chosen = argparse.Namespace(tokens=[1024, 4096], root_chunks=[0, 30])
    result = matching.run(tiny_options(tmp_root), chosen)
    latency, etcd, memory = result.tables
    assert latency.column("prompt tokens") == [1024, 4096] * 2
    assert latency.column("root chunks") == [0, 0, 30, 30]
    assert all(cell is not None for row in latency.rows for cell in row)
    (asked,) = etcd.column("a request")
    # Keepalives count too, and a busy machine has more of them in the same number of requests.
    assert asked is not None and 0 <= float(asked) < 0.1
    assert int(memory.column("chunks remembered")[0] or 0) == 2048
    assert list(tmp_root.iterdir()) == []
