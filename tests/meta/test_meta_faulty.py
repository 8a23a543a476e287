"""The injected faults behave as declared."""

from __future__ import annotations

import pytest

from kvstore.errors import Unavailable
from kvstore.meta.memory import MemoryMeta
from kvstore.meta.store import Absent, Put, WatchLost
from tests.kit.fake_meta import FakeClock
from tests.kit.faulty_meta import Fault, FaultyMeta, Rule


def faulty(clock: FakeClock | None = None, seed: int = 0) -> FaultyMeta:
    clock = clock or FakeClock()
    return FaultyMeta(MemoryMeta(clock=clock), seed, clock.advance)


def test_a_call_that_was_not_sent_has_no_effect() -> None:
    meta = faulty()
    meta.add(Rule(Fault.NOT_SENT, ("put",), key="a", times=1))
    with pytest.raises(Unavailable):
        meta.put("a", b"1")
    assert meta.get("a") is None
    meta.put("a", b"1")
    meta.put("b", b"1")
    assert meta.counts["put", Fault.NOT_SENT] == 1


def test_a_lost_reply_has_taken_effect() -> None:
    meta = faulty()
    meta.add(Rule(Fault.REPLY_LOST, ("txn",), skip_count=1, times=1))
    assert meta.txn((Absent("a"),), (Put("a", b"1"),)).succeeded
    with pytest.raises(Unavailable):
        meta.txn((Absent("b"),), (Put("b", b"1"),))
    assert meta.get("b") is not None


def test_a_late_call_takes_effect_when_it_lands() -> None:
    meta = faulty()
    meta.add(Rule(Fault.LATE, ("put",)))
    lease = meta.grant(10)
    for key, under in (("a", 0), ("b", lease)):
        with pytest.raises(Unavailable):
            meta.put(key, b"1", type(lease)(under))
    assert meta.get("a") is None
    meta.revoke(lease)
    assert meta.land() == 2
    assert meta.get("a") is not None
    assert meta.get("b") is None
    assert meta.land() == 0


def test_a_cut_watch_is_lost() -> None:
    meta = faulty()
    watch = meta.watch("a", 1)
    meta.cut_watches()
    with pytest.raises(WatchLost, match="cut"):
        watch.next(0)
    watch.close()


def test_random_faults_come_from_the_seed() -> None:
    def pattern(seed: int) -> list[bool]:
        meta = faulty(seed=seed)
        meta.add(Rule(Fault.NOT_SENT, probability=0.5))
        found = []
        for _ in range(50):
            try:
                meta.get("a")
                found.append(True)
            except Unavailable:
                found.append(False)
        return found

    assert pattern(1) == pattern(1) != pattern(2)
    assert 10 < sum(pattern(1)) < 40
