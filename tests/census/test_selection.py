"""The meaning of a selection, and the chunks that an order to clear covers."""

from __future__ import annotations

import json
import random

import pytest

from kvstore import Layout
from kvstore.census.selection import AHEAD_S, TEXT_BYTES_MAX, ClearOrder, Selection
from kvstore.census.standing import Standing
from kvstore.errors import InvalidRequest
from kvstore.format.header import Incarnation
from kvstore.format.lineage import (
    LABEL_BYTES_MAX,
    LineageId,
    Writer,
    check_label,
    incarnation,
    lineage_id,
    renewed,
    written,
)
from kvstore.namespace import Namespace
from tests.kit.cases import for_each

LAYOUT = Layout(layers=1, kv_heads=1, head_dim=8, dtype="float16", chunk_tokens=16)
NOW_S = 1_800_000_000.0
PLAIN = Namespace.of("m", LAYOUT)
ALICE = Namespace.of("m", LAYOUT, "aa11", "alice")
BOB = Namespace.of("m", LAYOUT, "aa22", "bob")
NAMESPACES = (PLAIN, ALICE, BOB)


def writer(number: int, **fields: str) -> Writer:
    known = {"host": f"host{number}", "version": "1", "node": bytes([number + 100] * 16).hex(), **fields}
    return Writer(session=bytes([number] * 16).hex(), pid=1, started_s=1, **known)


GOOD, BAD, CANARY = writer(1), writer(2, version="2"), writer(3, version="2", label="canary")
WRITERS = {each.lineage: each for each in (GOOD, BAD, CANARY)}


def resolved(**fields: object) -> ClearOrder:
    return Selection(**fields).resolve(NAMESPACES, WRITERS, NOW_S)  # type: ignore[arg-type]


def by(each: Writer, written_s: float = NOW_S - 100) -> Incarnation:
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
def test_a_writer_is_named_by_session_node_host_version_or_label(written_by: str, meant: set[Writer]) -> None:
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


def test_times_of_writing_hold_of_known_writers_only() -> None:
    order = resolved(since_s=NOW_S - 200, until_s=NOW_S - 50)
    assert order.covers(PLAIN.digest, by(GOOD, NOW_S - 200), 0)
    assert not order.covers(PLAIN.digest, by(GOOD, NOW_S - 50), 0)
    # As chunks written before there was lineage: the time in them is random.
    assert not order.covers(PLAIN.digest, incarnation(LineageId(b"\x00" * 8), NOW_S - 100, 1), 0)


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
    standing = Standing([order])
    for written_s, gone in ((NOW_S - 10, True), (NOW_S + AHEAD_S, True), (NOW_S + AHEAD_S + 1, False)):
        assert order.forbids(PLAIN.digest, by(BAD, written_s), 0) == gone
        assert standing.forbids(PLAIN.digest, by(BAD, written_s)) == gone
    assert not standing.forbids(PLAIN.digest, by(GOOD))
    assert not Standing() and standing


def test_what_is_read_is_not_old_any_more() -> None:
    assert not Standing([resolved(older_than_s=1)])


def test_an_order_about_a_tenant_keeps_all_of_it_away_but_is_not_kept() -> None:
    order = resolved(tenant="bob")
    assert not order.stands
    assert Standing([order]).forbids(BOB.digest, by(GOOD)) and not Standing([order]).forbids(ALICE.digest, by(GOOD))


@for_each("fields", [{"written_by": "version=2", "since_s": 4.5}, {"tenant": ""}, {"older_than_s": 9}])
def test_an_order_means_the_same_wherever_it_is_read(fields: dict[str, object]) -> None:
    order = resolved(**fields)
    assert ClearOrder.from_json(order.to_json()) == order


HOSTILE_NUMBERS = ("1e999", "NaN", "1" + "0" * 400, "-Infinity")


@for_each("number", HOSTILE_NUMBERS)
@for_each("name", ["since_s", "until_s", "unused_since_s", "ordered_s"])
def test_an_order_with_a_time_that_is_none_is_refused_and_ends_no_thread(name: str, number: str) -> None:
    record = {**json.loads(resolved(tenant="").to_json()), name: "HERE"}
    with pytest.raises(InvalidRequest, match="order"):
        ClearOrder.from_json(json.dumps(record).replace('"HERE"', number).encode())


@for_each("content", [b"", b"[]", b"null", b'{"namespaces": "00"}', b'{"namespaces": 3}', b"[" * 9999])
def test_what_is_no_order_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidRequest, match="order"):
        ClearOrder.from_json(content)


def test_a_publication_once_more_keeps_writer_and_time_and_has_another_incarnation() -> None:
    first = incarnation(BAD.lineage, NOW_S, 1)
    again = renewed(first, 2)
    assert again != first and written(again) == written(first) and len(again) == 16


def test_writers_survive_json_and_nothing_else_is_one() -> None:
    assert Writer.from_json(CANARY.to_json()) == CANARY
    assert Writer.from_json(CANARY.to_json().replace(b'"label"', b'"later"')).label == ""
    chance = random.Random(1)
    for _ in range(200):
        content = bytearray(CANARY.to_json())
        content[chance.randrange(len(content))] = chance.randrange(256)
        try:
            Writer.from_json(bytes(content))
        except InvalidRequest as error:
            assert "writer" in str(error)


@for_each("number", ["1e999", "-1e999", "1" + "0" * 400])
@for_each("name", ["pid", "started_s"])
def test_a_record_with_a_hostile_number_is_read_or_left_out_and_stops_nobody(name: str, number: str) -> None:
    record = json.dumps({**json.loads(CANARY.to_json()), name: "HERE"}).replace('"HERE"', number)
    try:
        assert Writer.from_json(record.encode()).session == CANARY.session
    except InvalidRequest as error:
        assert "writer" in str(error)


@for_each("name", ["node", "host", "version", "label"])
def test_what_a_record_says_always_fits_into_a_message(name: str) -> None:
    """JSON allows half a surrogate pair, which UTF-8 does not: every look-up of its chunks would fail."""
    record = json.dumps({**json.loads(CANARY.to_json()), name: "a\ud800b"}).encode()
    assert getattr(Writer.from_json(record), name) == "a?b"


@for_each("label", ["x" * (LABEL_BYTES_MAX + 1), "é" * LABEL_BYTES_MAX, "two\nlines", "\udcff", "\x1b[2J"])
def test_a_label_that_nobody_could_name_again_is_refused(label: str) -> None:
    with pytest.raises(InvalidRequest, match="label"):
        check_label(label)
    check_label("")
    check_label("x" * LABEL_BYTES_MAX)
