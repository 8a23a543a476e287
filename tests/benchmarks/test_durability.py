"""The benchmark of durabilities: its table, and that it compares what it stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import durability
from benchmarks.contents import WrongBytes
from kvstore.client.cache import Cache


def test_a_wrong_byte_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got = Cache.get

    def flipping(cache: Cache, tokens: Any) -> Any:
        count, kv = got(cache, tokens)
        kv.view("u1").flat[-1] ^= 1
        return count, kv

    monkeypatch.setattr(Cache, "get", flipping)
    with pytest.raises(WrongBytes, match="fsync"):
        durability.turn(tmp_path, "fsync", 0, 0.01, [])
