"""A store that is down, frozen or failing, and an SGLang that is killed: a miss in time, and a clean store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import QUICK
from tests.engines.sglang.pools import HostPool, backend, fill, indices, same
from tests.kit.faulty_root import EIO, ENOSPC, EROFS, Fails, FaultyRoot, Hang, Rule
from tests.kit.patience import eventually, returns

KEYS = [f"{number:064x}" for number in range(4)]
AT = [0, 1, 2, 3]


def filled(layout: str = "page_first") -> HostPool:
    pool = HostPool(layout)
    for page in AT:
        fill(pool, page, page)
    return pool


def assert_everything_is_a_miss(hicache: Any) -> None:
    assert returns(lambda: hicache.batch_exists(KEYS)) == 0
    assert returns(lambda: hicache.batch_get_v1(KEYS, indices([8, 9, 10, 11]))) == [False] * 4
    assert returns(lambda: hicache.batch_set_v1(["a" * 64], indices([0]))) == [False]
    assert returns(lambda: hicache.get(KEYS[0])) is None
    assert not returns(hicache.clear)


def test_a_store_that_is_down_when_sglang_starts_is_a_miss_in_time() -> None:
    with backend(filled(), {"connect": "127.0.0.1:1", **QUICK}) as hicache:
        assert_everything_is_a_miss(hicache)


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_a_root_that_hangs_is_a_miss_in_time_and_late_bytes_never_reach_the_pool(root: FaultyRoot, layout: str) -> None:
    pool = filled(layout)
    with backend(pool, {"root": "faulty", **QUICK}) as hicache:
        assert hicache.batch_set_v1(KEYS, indices(AT)) == [True] * 4
        hang = Hang()
        root.set_rules([Rule(operation, hang) for operation in ("open", "read", "stage")])
        assert returns(lambda: hicache.batch_get_v1(KEYS, indices([8, 9, 10, 11]))) == [False] * 4
        held = pool.kv_buffer.clone()
        assert returns(lambda: hicache.batch_set_v1(["a" * 64], indices([0]))) == [False]
        root.set_rules([])
        hang.release.set()
        eventually(lambda: hicache.batch_get_v1(KEYS, indices([16, 17, 18, 19])) == [True] * 4, "it is used again")
        assert all(same(pool, page, pool, 16 + page) for page in AT)
        for page in range(8, 12):
            assert pool.page(page * pool.page_size).equal(HostPool.page(_with(pool, held), page * pool.page_size))


def _with(pool: HostPool, buffer: Any) -> HostPool:
    other = HostPool(pool.layout)
    other.kv_buffer = buffer
    return other


@pytest.mark.parametrize("fault", [ENOSPC, EROFS, EIO])
def test_a_store_that_fails_leaves_nothing_to_be_found(root: FaultyRoot, fault: Fails) -> None:
    with backend(filled(), {"root": "faulty", **QUICK}) as hicache:
        root.set_rules([Rule("stage", fault)])
        assert hicache.batch_set_v1(KEYS, indices(AT)) == [False] * 4
        root.set_rules([])
        assert hicache.batch_exists(KEYS) == 0
        assert hicache.batch_set_v1(KEYS, indices(AT)) == [True] * 4


def test_a_store_that_fails_for_long_is_not_logged_for_every_page(
    root: FaultyRoot, caplog: pytest.LogCaptureFixture
) -> None:
    with backend(filled(), {"root": "faulty", **QUICK}) as hicache:
        root.set_rules([Rule("stage", EROFS)])
        for number in range(50):
            assert hicache.batch_set_v1([f"{number:064x}"], indices([0])) == [False]
            assert hicache.batch_exists(["f" * 64]) == 0
        root.set_rules([])
    assert caplog.text.count("sglang.call_failed") == 1


def test_calls_after_it_was_closed_are_misses(tmp_root: Path) -> None:
    pool = filled()
    with backend(pool, {"root": str(tmp_root)}) as hicache:
        hicache.batch_set_v1(KEYS, indices(AT))
    assert hicache.batch_get_v1(KEYS, indices([8, 9, 10, 11])) == [False] * 4
    assert hicache.batch_set_v1(["a" * 64], indices([0])) == [False]
    assert not hicache.clear()
    hicache.close()
