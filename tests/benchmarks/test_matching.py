"""The match benchmark: its answers are checked, and what it counts is counted by etcd itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import caching, matching
from benchmarks.contents import WrongBytes
from kvstore.client.cache import Cache
from kvstore.format import places


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
