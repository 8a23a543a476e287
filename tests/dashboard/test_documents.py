"""Documents over a real store: they show what exists and what failed, and the rest goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from kvstore.dashboard.views import Document
from tests.kit import faulty_meta
from tests.kit.boards import Shown, shown
from tests.kit.etcd import eventually
from tests.kit.faulty_root import Hang, Rule
from tests.kit.stores import TINY, kv_of

HOSTILE = "<script>alert('x')</script>"


@pytest.fixture
def board() -> Iterator[Shown]:
    with shown() as found:
        yield found


def until(ask: Callable[[], Document], holds: Callable[[Document], object]) -> Document:
    """The first document for which it holds."""
    found: list[Document] = []

    def look() -> object:
        found[:] = [ask()]
        return holds(found[0])

    eventually(look)
    return found[0]


def test_namespaces_pins_and_prefixes_are_shown_as_they_are_called(board: Shown) -> None:
    cache = board.store.namespace(HOSTILE, TINY, tenant="\u202eacme", fingerprint="f" * 4000)
    tokens = list(range(32))
    cache.put(tokens, kv_of(TINY, tokens))
    cache.put([*tokens[:16], *range(100, 116)], kv_of(TINY, [*tokens[:16], *range(100, 116)]))
    with cache.pin(tokens, ttl=600):
        pins = until(board.board.pins, lambda found: found["count"] and found["pins"][0]["namespace"])
        (row,) = pins["pins"]
        assert (row["namespace"], row["tenant"], row["tokens"], row["chunks"]) == (HOSTILE, "\u202eacme", 32, 8)
    names = until(board.board.namespaces, lambda found: found["namespaces"])
    assert [row["name"] for row in names["namespaces"]] == [HOSTILE]
    found = until(lambda: board.board.prefixes("", "", "bytes"), lambda found: len(found["runs"]) == 3)
    first, *rest = found["runs"]
    assert (first["chunks"], first["forks"], first["below"]["ends"], first["below"]["chunks"]) == (4, 2, 2, 12)
    assert {row["above"] for row in rest} == {first["id"]}
    zoomed = board.board.prefixes("", rest[0]["id"], "bytes")
    assert [row["id"] for row in zoomed["way"]] == [first["id"]]
    json.dumps(found, allow_nan=False)


def test_no_document_holds_tokens(board: Shown) -> None:
    # Ten digits each: seven were found by chance in a time or an id of one run in a hundred.
    tokens = list(range(4_123_456_000, 4_123_456_016))
    board.store.namespace("model", TINY).put(tokens, kv_of(TINY, tokens))
    until(lambda: board.board.prefixes("", "", "bytes"), lambda found: found.get("runs"))
    ask = board.board
    documents = [ask.overview(), ask.capacity(), ask.namespaces(), ask.pins(), ask.workers(), ask.damage()]
    said = json.dumps([*documents, ask.prefixes("", "", "long")])
    assert not any(str(token) in said for token in tokens)


def test_a_root_that_hangs_is_said_and_the_rest_goes_on(board: Shown) -> None:
    until(board.board.overview, lambda found: found["space"] is not None and found["cluster"] is not None)
    hang = Hang()
    board.root.set_rules([Rule("space", hang)])
    try:
        found = until(board.board.overview, lambda found: found["sources"]["root"]["error"])
        assert "no answer for" in found["sources"]["root"]["error"]
        assert any("the root" in item["text"] for item in found["attention"])
        assert found["space"] is not None, "what it said before is shown"
        board.store.namespace("meanwhile", TINY)
        until(board.board.namespaces, lambda found: found["namespaces"])
    finally:
        hang.release.set()


def test_an_etcd_that_does_not_answer_is_said_and_the_rest_goes_on(board: Shown) -> None:
    until(board.board.overview, lambda found: found["cluster"] is not None)
    board.meta.add(faulty_meta.Rule(faulty_meta.Fault.NOT_SENT))
    found = until(board.board.overview, lambda found: _only_etcd_fails(found["sources"]))
    assert found["cluster"] is not None and found["attention"][0]["level"] == "bad"
    board.meta.heal()
    until(board.board.overview, lambda found: found["sources"]["etcd"]["error"] is None)


def _only_etcd_fails(sources: Document) -> bool:
    return sources["etcd"]["error"] is not None and sources["root"]["error"] is None
