"""The meaning of a selection, and the orders to clear that it becomes."""

from __future__ import annotations

import pytest

from kvstore import Layout
from kvstore.census.selection import TEXT_BYTES_MAX, ClearOrder, Selection
from kvstore.core.namespace import Namespace
from kvstore.errors import InvalidRequest
from tests.kit.cases import for_each

LAYOUT = Layout(layers=1, kv_heads=1, head_dim=8, dtype="float16", chunk_tokens=16)
PLAIN = Namespace.of("m", LAYOUT)
ALICE = Namespace.of("m", LAYOUT, "aa11", "alice")
BOB = Namespace.of("m", LAYOUT, "aa22", "bob")
NAMESPACES = (PLAIN, ALICE, BOB)


def resolved(**fields: object) -> ClearOrder:
    return Selection(**fields).resolve(NAMESPACES, 1.5)  # type: ignore[arg-type]


@for_each(
    "fields, meant",
    [
        ({"namespace": ALICE.digest}, {ALICE}),
        ({"tenant": ""}, {PLAIN}),
        ({"tenant": "bob"}, {BOB}),
        ({"fingerprint": "aa"}, {ALICE, BOB}),
        ({"fingerprint": "aa", "tenant": "alice"}, {ALICE}),
    ],
)
def test_selection_means_namespaces_and_survives_json(fields: dict[str, object], meant: set[Namespace]) -> None:
    order = resolved(**fields)
    assert {each for each in NAMESPACES if order.means(each.digest)} == meant
    assert {each for each in NAMESPACES if order.means(each.id)} == meant
    assert ClearOrder.from_json(order.to_json()) == order


@for_each(
    "fields",
    [
        {},
        {"tenant": "nobody"},
        {"tenant": "\ud800"},
        {"namespace": b"short"},
        {"tenant": "", "fingerprint": "f" * (TEXT_BYTES_MAX + 1)},
    ],
)
def test_empty_or_invalid_selection_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        resolved(**fields)


@for_each(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"namespaces": "0011223344556677"}',
        b'{"namespaces": "", "issued_s": 1.0}',
        b'{"namespaces": "aabb", "issued_s": 1.0}',
        b'{"namespaces": 5, "issued_s": 1.0}',
    ],
)
def test_order_of_another_version_is_invalid(content: bytes) -> None:
    with pytest.raises(InvalidRequest):
        ClearOrder.from_json(content)
