"""One contract for all connectors: the bytes that an engine stored, or a miss; never an error that stops it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.connectors import CHUNK, KINDS, Connector, opener
from tests.kit.faulty_root import EIO, FaultyRoot, Rule

TOKENS = list(range(1, 4 * CHUNK + 1))
Opened = tuple[Callable[[], Connector], FaultyRoot | None]


@pytest.fixture(params=KINDS)
def opened(request: pytest.FixtureRequest, tmp_root: Path) -> Iterator[Opened]:
    with opener(request.param, tmp_root / "store") as made:
        yield made


@pytest.fixture
def connector(opened: Opened) -> Iterator[Connector]:
    made = opened[0]()
    yield made
    made.close()


def test_stored_prompt_is_loaded(connector: Connector) -> None:
    assert connector.load(TOKENS) == 0
    assert connector.store(TOKENS) == len(TOKENS)
    for count in range(0, len(TOKENS) + 1, CHUNK):
        assert connector.load(TOKENS[:count]) == count


def test_first_writer_wins(connector: Connector) -> None:
    connector.store(TOKENS)
    assert connector.store(TOKENS, wrong=True) == len(TOKENS)
    assert connector.load(TOKENS) == len(TOKENS)


def test_other_prompt_is_loaded_up_to_its_branch(connector: Connector) -> None:
    connector.store(TOKENS)
    assert connector.load([*TOKENS[: 2 * CHUNK], *range(900, 900 + CHUNK)]) == 2 * CHUNK


def test_second_connector_loads_after_first_closed(opened: Opened) -> None:
    open_one, _ = opened
    first = open_one()
    first.store(TOKENS)
    first.close()
    first.close()
    second = open_one()
    try:
        assert second.load(TOKENS) == len(TOKENS)
    finally:
        second.close()


def test_store_that_cannot_be_read_is_a_miss(opened: Opened, connector: Connector) -> None:
    root = opened[1]
    if root is None:
        pytest.skip("its root cannot be made to fail")
    connector.store(TOKENS)
    root.set_rules([Rule(operation, EIO, lambda name: name.startswith("chunks/")) for operation in ("open", "stat")])
    assert connector.load(TOKENS) < len(TOKENS)
    root.set_rules([])
    assert connector.load(TOKENS) == len(TOKENS)
