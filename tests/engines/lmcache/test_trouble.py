"""A store that is down, hangs or fails: every task ends in time, as a miss."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvstore.connectors.common import EngineSettings
from tests.engines.conftest import LIMITS, QUICK
from tests.engines.lmcache.objects import adapter, equal, found, key, loaded, made, stored
from tests.kit.faulty_root import ENOSPC, FaultyRoot, Hang, Rule
from tests.kit.patience import eventually, returns
from tests.kit.stores import store_on

KEYS = [key(number) for number in range(4)]
OBJECTS = [made(number) for number in range(4)]


def assert_everything_is_a_miss(l2: Any) -> None:
    assert returns(lambda: found(l2, KEYS)) == []
    targets = [made() for _ in KEYS]
    assert returns(lambda: loaded(l2, KEYS, targets)) == []
    assert not returns(lambda: stored(l2, [key(9)], [made(9)])).is_successful()
    assert not l2.report_status()["is_healthy"]


def test_a_store_that_is_down_from_the_start_is_a_miss_in_time() -> None:
    with adapter(connect="127.0.0.1:1", **QUICK) as l2:
        assert_everything_is_a_miss(l2)


def test_a_root_that_hangs_is_a_miss_in_time_and_late_bytes_never_reach_the_memory(root: FaultyRoot) -> None:
    with adapter(root="faulty", **QUICK) as l2:
        assert stored(l2, KEYS, OBJECTS).is_successful()
        hang = Hang()
        root.set_rules([Rule(operation, hang) for operation in ("open", "read", "stat", "stage")])
        targets = [made() for _ in KEYS]
        assert returns(lambda: loaded(l2, KEYS, targets)) == []
        held = [each.raw_data.clone() for each in targets]
        assert returns(lambda: found(l2, [key(8)])) == []
        assert not returns(lambda: stored(l2, [key(9)], [made(9)])).is_successful()
        root.set_rules([])
        hang.release.set()
        again = [made() for _ in KEYS]
        eventually(lambda: loaded(l2, KEYS, again) == [0, 1, 2, 3], "it is used again")
        assert equal(again, OBJECTS)
        assert all(each.raw_data.equal(before) for each, before in zip(targets, held, strict=True))


def test_a_load_of_what_many_look_ups_locked_is_one_load_and_look_ups_do_not_wait_for_it(
    root: FaultyRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Enough threads that the root never counts as hung, and each read has its whole deadline.
    patient = replace(LIMITS, stall_s=60.0, io_threads=256)
    monkeypatch.setattr(EngineSettings, "open", lambda _: store_on(root, patient))
    many = [key(number) for number in range(24)]
    with adapter(root="faulty", **QUICK) as l2:
        assert stored(l2, many, [made(number) for number in range(24)]).is_successful()
        assert all(found(l2, [each]) == [0] for each in many)
        hang = Hang()
        root.set_rules([Rule(operation, hang) for operation in ("open", "read")])
        tasks = [l2.submit_load_task(many, [made() for _ in many]) for _ in range(4)]
        assert hang.reached.wait(30)
        began_s = time.monotonic()
        assert found(l2, KEYS) == [0, 1, 2, 3]
        assert time.monotonic() - began_s < QUICK["load_timeout_s"]
        assert returns(lambda: loaded(l2, KEYS, [made() for _ in KEYS])) == []
        assert all(returns(partial(_ended, l2, task)) for task in tasks)
        root.set_rules([])
        hang.release.set()


def _ended(l2: Any, task: int) -> bool:
    while (result := l2.query_load_result(task)) is None:
        time.sleep(0.01)
    return bool(result.popcount() == 0)


def test_a_store_that_fails_says_so_and_leaves_nothing_to_be_found(root: FaultyRoot) -> None:
    with adapter(root="faulty", **QUICK) as l2:
        assert found(l2, KEYS) == []
        root.set_rules([Rule("stage", ENOSPC)])
        assert not stored(l2, KEYS, OBJECTS).is_successful()
        root.set_rules([])
        assert found(l2, KEYS) == []
        assert stored(l2, KEYS, OBJECTS).is_successful()
