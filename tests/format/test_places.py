"""Names on the root: from an address and back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.address import Address
from kvstore.core.namespace import NamespaceId
from kvstore.format import places

addresses = st.binary(min_size=16, max_size=16).map(Address)
namespace_ids = st.binary(min_size=8, max_size=8).map(NamespaceId)
shard_bits = st.integers(0, places.SHARD_BITS_MAX)


@given(addresses, namespace_ids, shard_bits)
def test_chunk_name_is_read_back(address: Address, namespace: NamespaceId, bits: int) -> None:
    folder, _, last = places.chunk(address, namespace, bits).rpartition("/")
    assert places.parse_chunk(last) == (address, namespace)
    assert folder == places.shard_folder(places.shard(address, bits))


@given(addresses, shard_bits)
def test_shard_is_the_first_bits_of_the_address(address: Address, bits: int) -> None:
    number = places.shard(address, bits)
    assert 0 <= number < 1 << bits
    assert f"{int.from_bytes(address, 'big'):0128b}"[:bits] == (f"{number:0{bits}b}" if bits else "")


@given(st.text(max_size=80))
def test_another_name_is_no_chunk(name: str) -> None:
    parsed = places.parse_chunk(name)
    assert parsed is None or f"{parsed[0].hex()}.{parsed[1].hex()}" == name


def test_almost_a_chunk_name_is_none() -> None:
    for name in (
        "",
        ".",
        "FORMAT",
        "a" * 32,
        f"{'a' * 32}.",
        f"{'a' * 32}.{'b' * 15}",
        f"{'a' * 32}.{'b' * 17}",
        f"{'a' * 31}.{'b' * 16}",
        f"{'g' * 32}.{'b' * 16}",
        f"{'a' * 32}.{'b' * 16}.tmp",
        f"{'A' * 32}.{'b' * 16}",
        f"{'aa ' * 10}aa.{'b' * 16}",
        f"{'a' * 32}.{'b ' * 8}",
    ):
        assert places.parse_chunk(name) is None


def test_names_of_sessions_never_meet() -> None:
    one, other = bytes(16), bytes(15) + b"\x01"
    names = [places.staged(session, number) for session in (one, other) for number in range(50)]
    names += [
        places.quarantined(Address(address), session, number)
        for address in (one, other)
        for session in (one, other)
        for number in range(10)
    ]
    assert len(set(names)) == len(names)
    assert all(name.startswith(places.staging_folder(one) + "/") for name in names[:50])
