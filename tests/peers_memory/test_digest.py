"""A digest as bytes and back, and how wrong bytes are refused."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.peers.reports import DIGEST_BYTES_MAX, PRINTS_MAX, decode, encode, spots_of
from tests.kit.peer_reports import addresses_of, print_of, shard_of


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=200))
def test_prints_come_back(numbers: list[int]) -> None:
    prints = np.array(sorted(numbers), np.uint32)
    assert decode(encode(prints)).tolist() == prints.tolist()


def test_a_digest_is_bounded_and_says_so() -> None:
    """Only a part is published of too many prints, and every value stays under the limit, whatever the prints are."""
    prints = np.sort(np.random.default_rng(1).integers(0, 1 << 32, 3 * PRINTS_MAX, dtype=np.uint32))
    value = encode(prints)
    assert len(value) <= DIGEST_BYTES_MAX
    assert decode(value).tolist() == prints[:PRINTS_MAX].tolist()
    assert struct.unpack_from("<HHII", value)[2:] == (PRINTS_MAX, len(prints))
    random = np.random.default_rng(2).integers(0, 256, 4 * PRINTS_MAX, dtype=np.uint8)
    assert len(zlib.compress(random.tobytes(), 1)) + 12 <= DIGEST_BYTES_MAX, "planes that do not compress"


@given(st.binary(max_size=300))
def test_other_bytes_are_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode(value)


def test_a_lying_digest_is_refused() -> None:
    for value in (
        struct.pack("<HHII", 2, 0, 1, 1) + zlib.compress(bytes(4)),
        struct.pack("<HHII", 1, 0, 0, 0) + zlib.compress(b""),
        struct.pack("<HHII", 1, 0, 2, 2) + zlib.compress(bytes(4)),
        struct.pack("<HHII", 1, 0, 1, 1) + zlib.compress(bytes(1 << 24)),
        struct.pack("<HHII", 1, 0, 2, 2) + zlib.compress(b"\xff" * 8),
        struct.pack("<HHII", 1, 0, PRINTS_MAX + 1, 1) + zlib.compress(bytes(4)),
        bytes(DIGEST_BYTES_MAX + 1),
    ):
        with pytest.raises(InvalidRequest):
            decode(value)


def test_spots_are_shard_and_print() -> None:
    addresses = addresses_of(100)
    assert spots_of(addresses).tolist() == [shard_of(each) << 32 | print_of(each) for each in addresses]
