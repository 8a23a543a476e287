"""The keys of a root that bounds itself: limits of stores, and the level that they claim from (rule S6)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.errors import InvalidRequest
from kvstore.meta.bounds import CLAIMED_SHARE, NO_BOUND, Bound, Bounds
from kvstore.meta.keys import Keys, SessionId
from kvstore.meta.memory import MemoryMeta
from tests.kit.cases import for_each

KEYS = Keys(bytes(16))


@pytest.fixture
def meta() -> Iterator[MemoryMeta]:
    made = MemoryMeta()
    yield made
    made.close()


@pytest.fixture
def bounds(meta: MemoryMeta) -> Bounds:
    return Bounds(meta, KEYS)


def level(meta: MemoryMeta) -> bytes | None:
    found = meta.get(KEYS.level)
    return None if found is None else found.value


def yes() -> bool:
    return True


def no() -> bool:
    return False


def test_an_empty_root_is_claimed_from_and_an_unknown_one_never(meta: MemoryMeta, bounds: Bounds) -> None:
    assert bounds.claim(10, 1000, no) is None and level(meta) is None
    assert bounds.claim(10, 1000, yes) is not None and level(meta) == b'{"bytes":10}'
    assert bounds.claim(5, 1000, no) is not None and level(meta) == b'{"bytes":15}', "from here on the level is known"


def test_claims_end_below_the_bound(meta: MemoryMeta, bounds: Bounds) -> None:
    most = int(CLAIMED_SHARE * 1000)
    assert bounds.claim(most, 1000, yes) is not None
    assert bounds.claim(1, 1000, yes) is None and level(meta) == f'{{"bytes":{most}}}'.encode()
    assert bounds.claim(1, None, yes) is not None, "without a bound it is only counted"


def test_what_was_not_written_goes_back_and_what_was_written_beyond_counts(meta: MemoryMeta, bounds: Bounds) -> None:
    claim = bounds.claim(100, 1000, yes)
    assert claim is not None
    bounds.settle(40, claim.made_at)
    assert level(meta) == b'{"bytes":60}'
    bounds.settle(-15, claim.made_at)
    assert level(meta) == b'{"bytes":75}'


def test_what_goes_back_to_another_level_changes_nothing(meta: MemoryMeta, bounds: Bounds) -> None:
    """A collector has counted in between: its level has all that was written, and nothing of the claim."""
    claim = bounds.claim(100, 1000, yes)
    assert claim is not None
    meta.txn((), (bounds.end_claims(),))
    assert bounds.claim(1, 1000, no) is None
    bounds.leave(300)
    bounds.settle(40, claim.made_at)
    assert level(meta) == b'{"bytes":300}'
    bounds.leave(100)
    assert level(meta) == b'{"bytes":400}', "what was claimed since the first word went counts beside the second one"


def test_a_level_that_cannot_be_read_is_full(meta: MemoryMeta, bounds: Bounds) -> None:
    for value in (b"", b"[]", b'{"bytes":"1"}', b'{"bytes":-1}', b'{"bytes":true}'):
        meta.put(KEYS.level, value)
        assert bounds.claim(1, 1 << 40, yes) is None


def test_the_smallest_limits_of_live_stores_count(meta: MemoryMeta, bounds: Bounds) -> None:
    assert bounds.smallest() == NO_BOUND
    asked = (Bound(500, None), Bound(None, 60.0), Bound(700, 5.0))
    leases = [meta.grant(60) for _ in asked]
    for number, (bound, lease) in enumerate(zip(asked, leases, strict=True)):
        bounds.put(SessionId(bytes([number]) * 16), lease, bound)
    meta.put(KEYS.bound_of(SessionId(bytes(16))[:15] + b"x"), b"nonsense")  # type: ignore[arg-type]
    assert bounds.smallest() == Bound(500, 5.0)
    meta.revoke(leases[0])
    meta.revoke(leases[2])
    assert bounds.smallest() == Bound(None, 60.0)


@for_each("value", [b"", b"7", b'{"max_bytes":0}', b'{"max_bytes":"1"}', b'{"ttl_s":0}', b'{"ttl_s":true}'])
def test_a_bound_that_makes_no_sense_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequest):
        Bound.from_json(value)
    for bound in (NO_BOUND, Bound(7, None), Bound(7, 1.5)):
        assert Bound.from_json(bound.to_json()) == bound
