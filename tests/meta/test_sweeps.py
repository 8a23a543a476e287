"""The records of sweeps in etcd: damaged ones are refused, and filters never miss a victim."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.address import Address
from kvstore.errors import RootMismatch
from kvstore.meta.keys import SweepId
from kvstore.meta.sweeps import EXACT_MAX, NO_NONCE, VICTIMS_MAX, Condemned, CondemnedSet, Seq
from tests.kit.cases import for_each

SWEEP, CHECKSUM = SweepId(b"s" * 16), b"c" * 16


def addresses(count: int, seed: int = 1) -> list[Address]:
    source = random.Random(seed)
    return [Address(source.randbytes(16)) for _ in range(count)]


@for_each("count", [1, 2, EXACT_MAX, EXACT_MAX + 1, 5_000, VICTIMS_MAX])
def test_every_victim_is_condemned_exactly_or_by_a_filter(count: int) -> None:
    victims = addresses(count)
    record = Condemned.from_bytes(Condemned.of_victims(SWEEP, CHECKSUM, victims).to_bytes())
    assert record.is_filter == (count > EXACT_MAX) and record.victims_count == count
    members = CondemnedSet(record)
    assert all(victim in members for victim in victims)
    assert len(record.to_bytes()) < 64 * 1024, "etcd's keys stay small"


def test_a_filter_condemns_few_others_of_its_shard_and_an_exact_list_none() -> None:
    def of_shard(count: int, seed: int) -> list[Address]:
        return [Address(b"\x2a\x17" + address[2:]) for address in addresses(count, seed)]

    others = of_shard(50_000, seed=2)
    exact = CondemnedSet(Condemned.of_victims(SWEEP, CHECKSUM, of_shard(EXACT_MAX, seed=3)))
    assert not any(other in exact for other in others)
    filtered = CondemnedSet(Condemned.of_victims(SWEEP, CHECKSUM, of_shard(VICTIMS_MAX, seed=3)))
    assert sum(other in filtered for other in others) < 20, "each ends the match of a whole prompt"


@given(st.integers(0, 200), st.binary(max_size=40))
def test_a_record_that_was_cut_or_lengthened_is_refused(cut: int, more: bytes) -> None:
    whole = Condemned.of_victims(SWEEP, CHECKSUM, addresses(5)).to_bytes()
    content = whole[: max(0, len(whole) - cut)] + more
    if content != whole:
        with pytest.raises(RootMismatch):
            found = Condemned.from_bytes(content)
            assert found.to_bytes() != whole, "only the addresses may differ"
            raise RootMismatch("same length")


def test_links_of_the_chain_are_read_back_or_refused() -> None:
    link = Seq(b"n" * 16, NO_NONCE, 2.5)
    assert Seq.from_json(link.to_json()) == link
    for wrong in (b"", b"{}", b"[]", b'{"nonce":"aa","prev":"bb","pace_s":0}', link.to_json()[:-2]):
        with pytest.raises(RootMismatch):
            Seq.from_json(wrong)
