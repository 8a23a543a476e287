"""A node's memory of chunks, against a plain dictionary: one by one, many at once, and in a full table."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.address import Address
from kvstore.core.clock import SystemClock
from kvstore.core.recency import QUANTUM_S
from kvstore.engine.chunk_store import PresenceCache
from kvstore.format import places
from kvstore.native.library import WAYS

BITS = 8
# Four rows, all of which they fill exactly: nothing is ever dropped, and every row is fought over.
ROWS = 4
POOL = [
    Address(bytes([row | way << 2]) + bytes([way]) * 15) for row, way in itertools.product(range(ROWS), range(WAYS))
]

numbers = st.integers(100, 103)
several = st.lists(st.sampled_from(POOL), max_size=60)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(POOL), numbers, st.booleans()),
        st.tuples(st.just("add_all"), several, numbers, st.booleans()),
        st.tuples(st.just("add_each"), several, numbers, st.integers(0, (1 << 40) - 1)),
        st.tuples(st.just("late"), several, numbers, st.booleans()),
        st.tuples(st.just("forget"), st.sampled_from(POOL), numbers, st.booleans()),
        st.tuples(st.just("forget_shard"), st.sampled_from(POOL), numbers, st.booleans()),
        st.tuples(st.just("clear"), st.just(None), numbers, st.booleans()),
    ),
    max_size=25,
)


class Plain:
    """``PresenceCache`` as a dictionary, which forgets nothing."""

    def __init__(self) -> None:
        self.seen: dict[Address, tuple[int, bool]] = {}

    def add(self, address: Address, number: int, renewed: bool) -> None:
        before = self.seen.get(address)
        if before is None or not (before[1] and before[0] >= number):
            self.seen[address] = (number, renewed)

    def is_present(self, address: Address, number: int) -> bool:
        return address in self.seen and self.seen[address][0] >= number - 1

    def is_renewed(self, address: Address, number: int) -> bool:
        return address in self.seen and self.seen[address][1] and self.seen[address][0] >= number


@given(steps, several, numbers)
@settings(max_examples=300, deadline=None)
def test_it_answers_like_a_dictionary_while_nothing_has_to_be_dropped(
    done: list[tuple[str, object, int, int]], asked: list[Address], now: int
) -> None:
    known, plain = PresenceCache(ROWS * WAYS, QUANTUM_S, SystemClock()), Plain()
    for what, whom, number, flag in done:
        at_s = number * QUANTUM_S
        addresses = [Address(each) for each in whom] if isinstance(whom, list) else []
        one = Address(whom) if isinstance(whom, bytes) else POOL[0]
        match what:
            case "add":
                known.add(one, at_s, renewed=bool(flag), epoch=known.epoch)
                plain.add(one, number, bool(flag))
            case "add_all":
                known.add_all(addresses, at_s, renewed=bool(flag), epoch=known.epoch)
                for address in addresses:
                    plain.add(address, number, bool(flag))
            case "add_each":
                # An address twice in one call has the same stamp each time.
                renewed = [bool(flag >> POOL.index(address) & 1) for address in addresses]
                known.add_all(addresses, at_s, renewed=np.array(renewed, np.bool_), epoch=known.epoch)
                for address, is_renewed in zip(addresses, renewed, strict=True):
                    plain.add(address, number, is_renewed)
            case "late":
                known.add_all(addresses, at_s, renewed=bool(flag), epoch=known.epoch - 1)
            case "forget":
                known.forget(one)
                plain.seen.pop(one, None)
            case "forget_shard":
                shard = places.shard(one, BITS)
                known.forget_shards([shard], BITS)
                plain.seen = {each: seen for each, seen in plain.seen.items() if places.shard(each, BITS) != shard}
            case "clear":
                known.clear()
                plain.seen.clear()
    now_s = now * QUANTUM_S
    assert len(known) == len(plain.seen)
    assert [known.is_present(each, now_s) for each in POOL] == [plain.is_present(each, now) for each in POOL]
    leading = itertools.takewhile(lambda each: plain.is_present(each, now), asked)
    assert known.leading_count(b"".join(asked), now_s) == len(list(leading))
    assert known.unrenewed(b"".join(asked), now_s) == [
        at for at, each in enumerate(asked) if not plain.is_renewed(each, now)
    ]


@given(st.lists(st.lists(st.binary(min_size=16, max_size=16), max_size=60), max_size=6))
@settings(deadline=None)
def test_a_full_table_drops_what_was_seen_before_and_never_invents(batches: list[list[bytes]]) -> None:
    known = PresenceCache(2 * WAYS, QUANTUM_S, SystemClock())
    added: set[bytes] = set()
    for number, batch in enumerate(batches, 100):
        addresses = [Address(each) for each in batch]
        known.add_all(addresses, number * QUANTUM_S, renewed=False, epoch=known.epoch)
        added |= set(batch)
        by_row: dict[int, set[bytes]] = {}
        for each in addresses:
            by_row.setdefault(each[0] & 1, set()).add(each[:8])
        present = {each[:8] for each in addresses if known.is_present(each, number * QUANTUM_S)}
        for row in by_row.values():
            assert len(row & present) == min(len(row), WAYS), "the newest ones have the room there is"
        assert len(known) <= 2 * WAYS
        strangers = [Address(bytes(each ^ 0x55 for each in address)) for address in addresses]
        for each in strangers:
            assert not known.is_present(each, number * QUANTUM_S) or each[:8] in {one[:8] for one in added}
