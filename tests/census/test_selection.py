"""The meaning of a selection, and the chunks that an order to clear covers."""

from __future__ import annotations

import random

import pytest

from kvstore import Layout
from kvstore.census.selection import AHEAD_S, TEXT_BYTES_MAX, ClearFilter, ClearOrder, Selection
from kvstore.core.namespace import Namespace
from kvstore.errors import InvalidRequest
from kvstore.format.header import Incarnation, WriterRecord, incarnation, lineage_id, renewed, written
from tests.kit.cases import for_each

LAYOUT = Layout(layers=1, kv_heads=1, head_dim=8, dtype="float16", chunk_tokens=16)
NOW_S = 1_800_000_000.0
PLAIN = Namespace.of("m", LAYOUT)
ALICE = Namespace.of("m", LAYOUT, "aa11", "alice")
BOB = Namespace.of("m", LAYOUT, "aa22", "bob")
NAMESPACES = (PLAIN, ALICE, BOB)


def writer(number: int, **fields: str) -> WriterRecord:
    known = {"host": f"host{number}", "version": "1", "node": bytes([number + 100] * 16).hex(), **fields}
    return WriterRecord(session=bytes([number] * 16).hex(), pid=1, started_s=1, **known)


GOOD, BAD, CANARY = writer(1), writer(2, version="2"), writer(3, version="2", label="canary")
WRITERS = {each.lineage: each for each in (GOOD, BAD, CANARY)}


def resolved(**fields: object) -> ClearOrder:
    return Selection(**fields).resolve(NAMESPACES, WRITERS, NOW_S)  # type: ignore[arg-type]


def by(each: WriterRecord, written_s: float = NOW_S - 100) -> Incarnation:
    return incarnation(each.lineage, written_s, 7)


@for_each(
    "written_by, meant",
    [
        ("version=2", {BAD, CANARY}),
        ("label=canary", {CANARY}),
        ("host=host1", {GOOD}),
        (f"node={BAD.node}", {BAD}),
        (BAD.session, {BAD}),
    ],
)
def test_a_writer_is_named_by_session_node_host_version_or_label(written_by: str, meant: set[WriterRecord]) -> None:
    order = resolved(written_by=written_by)
    for each in (GOOD, BAD, CANARY):
        assert order.covers(ALICE.digest, by(each), NOW_S) == (each in meant), each


def test_a_session_without_a_record_is_found_by_its_own_name() -> None:
    lost = bytes(range(16))
    order = resolved(written_by=lost.hex())
    assert order.covers(PLAIN.digest, incarnation(lineage_id(lost), 1, 1), 0)


@for_each("written_by", ["version=3", "label=", "colour=red", "12ab", "zz" * 16])
def test_a_writer_that_nobody_is_is_refused(written_by: str) -> None:
    with pytest.raises(InvalidRequest, match=r"writer|written by|there are"):
        resolved(written_by=written_by)


@for_each(
    "fields, meant",
    [
        ({"namespace": ALICE.digest}, {ALICE}),
        ({"tenant": ""}, {PLAIN}),
        ({"tenant": "bob"}, {BOB}),
        ({"fingerprint": "aa"}, {ALICE, BOB}),
        ({"fingerprint": "aa", "tenant": "alice"}, {ALICE}),
        ({"written_by": "version=1"}, {PLAIN, ALICE, BOB}),
    ],
)
def test_namespaces_are_meant_by_what_they_are(fields: dict[str, object], meant: set[Namespace]) -> None:
    order = resolved(**fields)
    assert {each for each in NAMESPACES if order.covers(each.digest, by(GOOD), NOW_S)} == meant
    assert {each for each in NAMESPACES if order.means(each.id)} == meant


@for_each(
    "fields",
    [
        {},
        {"older_than_s": -1},
        {"older_than_s": float("nan")},
        {"since_s": 1e300},
        {"since_s": 5, "until_s": 5},
        {"tenant": "nobody"},
        {"tenant": "\ud800"},
        {"written_by": "label=\ud800"},
        {"tenant": "", "fingerprint": "f" * (TEXT_BYTES_MAX + 1)},
    ],
)
def test_nothing_and_nonsense_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        resolved(**fields)


def test_who_clears_one_tenant_is_not_told_who_else_writes() -> None:
    with pytest.raises(InvalidRequest, match="there are: "):
        resolved(written_by="version=nobody")
    with pytest.raises(InvalidRequest) as raised:
        resolved(written_by="version=nobody", tenant="bob")
    assert "there are" not in str(raised.value)


def test_what_was_written_in_the_second_that_is_named_is_meant() -> None:
    """Chunks record whole seconds, and a clear since a moment must include everything after it."""
    order = resolved(since_s=NOW_S - 200.5)
    assert order.covers(PLAIN.digest, by(GOOD, NOW_S - 200.1), 0)
    assert not order.covers(PLAIN.digest, by(GOOD, NOW_S - 201.5), 0)


def test_age_is_the_time_since_the_last_use() -> None:
    order = resolved(older_than_s=3600)
    assert order.covers(PLAIN.digest, by(GOOD), NOW_S - 3601)
    assert not order.covers(PLAIN.digest, by(GOOD), NOW_S - 3599)
    assert not order.needs_headers and not order.stands


def test_an_order_leaves_copies_of_what_was_written_after_it() -> None:
    """A repaired writer continues under the same session, and may learn of an order much later."""
    order = resolved(written_by="version=2")
    standing = ClearFilter([order])
    for written_s, gone in ((NOW_S - 10, True), (NOW_S + AHEAD_S, True), (NOW_S + AHEAD_S + 1, False)):
        assert order.forbids(PLAIN.digest, by(BAD, written_s), 0) == gone
        assert standing.forbids(PLAIN.digest, by(BAD, written_s)) == gone
    assert not standing.forbids(PLAIN.digest, by(GOOD))
    assert not ClearFilter() and standing


def test_an_order_about_a_tenant_keeps_all_of_it_away_but_is_not_kept() -> None:
    order = resolved(tenant="bob")
    assert not order.stands
    assert ClearFilter([order]).forbids(BOB.digest, by(GOOD)) and not ClearFilter([order]).forbids(
        ALICE.digest, by(GOOD)
    )


@for_each("fields", [{"written_by": "version=2", "since_s": 4.5}, {"tenant": ""}, {"older_than_s": 9}])
def test_an_order_means_the_same_wherever_it_is_read(fields: dict[str, object]) -> None:
    order = resolved(**fields)
    assert ClearOrder.from_json(order.to_json()) == order


def test_a_publication_once_more_keeps_writer_and_time_and_has_another_incarnation() -> None:
    first = incarnation(BAD.lineage, NOW_S, 1)
    again = renewed(first, 2)
    assert again != first and written(again) == written(first) and len(again) == 16


def test_writers_survive_json_and_nothing_else_is_one() -> None:
    assert WriterRecord.from_json(CANARY.to_json()) == CANARY
    assert WriterRecord.from_json(CANARY.to_json().replace(b'"label"', b'"later"')).label == ""
    chance = random.Random(1)
    for _ in range(200):
        content = bytearray(CANARY.to_json())
        content[chance.randrange(len(content))] = chance.randrange(256)
        try:
            WriterRecord.from_json(bytes(content))
        except InvalidRequest as error:
            assert "writer" in str(error)
