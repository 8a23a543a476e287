"""The records of sweeps in etcd: damaged ones are refused."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.address import Address
from kvstore.errors import RootMismatch
from kvstore.meta.keys import SweepId
from kvstore.meta.sweeps import NO_NONCE, VICTIMS_MAX, Condemned, Seq
from tests.kit.cases import for_each

SWEEP, CHECKSUM = SweepId(b"s" * 16), b"c" * 16


def addresses(count: int, seed: int = 1) -> list[Address]:
    source = random.Random(seed)
    return [Address(source.randbytes(16)) for _ in range(count)]


@for_each("count", [1, 2, VICTIMS_MAX])
def test_a_record_is_read_back(count: int) -> None:
    victims = addresses(count)
    record = Condemned.of_victims(SWEEP, CHECKSUM, victims)
    assert Condemned.from_bytes(record.to_bytes()) == record
    assert record.victims == {*victims} and record.victims_count == count
    assert len(record.to_bytes()) < 64 * 1024, "etcd's keys stay small"


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
