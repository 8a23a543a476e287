"""Names on the root, from an address and back; and JSON of others, never deep in the stack."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.address import Address
from kvstore.core.namespace import NamespaceId
from kvstore.core.validate import DEPTH_MAX, parse_json
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


HOSTILE = {
    "lists": b"[" * 9999,
    "objects": b'{"":' * 9999,
    "behind a string with brackets that close": b'["' + b"]" * 9999 + b'",' + b"[" * 9999,
    "behind an escaped quote": b'["\\"",' + b"[" * 9999,
    "behind an escaped backslash": b'["\\\\",' + b"[" * 9999,
    "as text in UTF-16": ("[" * 9999).encode("utf-16"),
    "as text in UTF-16, behind a letter whose bytes are quotes": ("[\u2222" + "[" * 9999).encode("utf-16-le"),
}

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='[]{}"\\a', max_size=4), inner),
)


@given(VALUES, st.booleans())
def test_what_is_not_deep_is_what_json_says(value: Any, is_text: bool) -> None:
    text = json.dumps(value, ensure_ascii=False)
    content = text if is_text else text.encode(errors="surrogatepass")
    try:
        found = parse_json(content)
    except UnicodeDecodeError:
        assert any("\ud800" <= each <= "\udfff" for each in text)
    else:
        assert found == json.loads(text)


def test_the_deepest_that_is_read() -> None:
    def run_case(is_object: bool) -> None:
        def nested(depth: int) -> str:
            return '{"":' * (depth - 1) + "{}" + "}" * (depth - 1) if is_object else "[" * depth + "]" * depth

        assert parse_json(nested(DEPTH_MAX)) is not None
        with pytest.raises(ValueError, match="deeper than 100 levels"):
            parse_json(nested(DEPTH_MAX + 1))

    for is_object in (False, True):
        run_case(is_object)


def test_what_is_nested_deep_takes_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer that runs in the middle of it would fail otherwise: its frames have no room."""
    for content in HOSTILE.values():
        depth, frame = 0, sys._getframe()
        while frame is not None:
            depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(depth + DEPTH_MAX + 50)
        try:
            with pytest.raises(ValueError, match=r"deeper|decode"):
                parse_json(content)
        finally:
            sys.setrecursionlimit(before)
