"""Pins by a request's word: the prompt under a name, once it is stored, and what ends it; no request waits or fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.connectors.vllm.blocks import GroupKind, LayerGroups
from kvstore.core.results import PinRecord
from kvstore.errors import Overloaded
from tests.kit.cases import for_each
from tests.kit.vllm_connector import Request, cache, halves, store


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    with halves() as found:
        yield found


def ended(half: Any, number: int = 0, tokens: int = 12, **said: Any) -> None:
    """A request with these words, from its arrival to its end."""
    request = Request(f"r{number}", tokens, kv_transfer_params={"kvstore": said})
    half.arrived(request)
    half.finished(request)


def pins(half: Any) -> list[PinRecord]:
    found: list[PinRecord] = half._store.store().pins()
    return found


def drained(half: Any) -> bool:
    found: bool = half._pinning.drain(60.0)
    return found


def test_a_prompt_is_pinned_under_its_name_until_a_request_unpins_it(make: Callable[..., Any]) -> None:
    half = make()
    store(half, Request("stored", 12), 3)
    ended(half, pin="system", pin_ttl=60)
    assert drained(half)
    (pin,) = pins(half)
    assert (pin.owner, pin.tokens) == ("system", 3), "three blocks of one token, as the namespace counts"
    ended(half, unpin="other")
    assert drained(half) and len(pins(half)) == 1
    ended(half, unpin="system")
    assert drained(half) and pins(half) == []


def test_a_pin_waits_for_blocks_on_their_way_but_no_request_does(make: Callable[..., Any]) -> None:
    half = make(store_timeout_s=300.0)
    ended(half, pin="system")
    assert pins(half) == []
    store(half, Request("stored", 12), 3)
    assert drained(half)
    assert [pin.tokens for pin in pins(half)] == [3]


def test_an_unpin_ends_the_pin_before_it_that_still_waits_for_blocks(make: Callable[..., Any]) -> None:
    half = make(store_timeout_s=300.0)
    ended(half, pin="system")
    ended(half, 1, unpin="system")
    store(half, Request("stored", 12), 3)
    assert drained(half)
    assert pins(half) == []


def test_of_two_pins_of_a_name_the_later_one_stays_whichever_is_stored_first(make: Callable[..., Any]) -> None:
    half = make(store_timeout_s=300.0)
    ended(half, 0, 24, pin="system")
    store(half, Request("stored", 12), 3)
    ended(half, 1, 12, pin="system")
    store(half, Request("stored", 24), 6)
    assert drained(half)
    assert [pin.tokens for pin in pins(half)] == [3]


def test_states_that_are_not_stored_at_every_block_are_not_waited_for(make: Callable[..., Any]) -> None:
    half = make([LayerGroups((0,), 4), LayerGroups((1,), 4, GroupKind.STATE)], store_timeout_s=300.0)
    request = Request("stored", 12)
    store(half, request, 3)
    assert cache(half).put([request.block_hashes[2] + b"\1"], [bytes(8)]) == [True]
    ended(half, pin="system")
    assert drained(half)
    assert sorted(pin.tokens for pin in pins(half)) == [1, 3]


@for_each("hints", [{"priority": "high"}, {"pin": "a name"}, {"pin_ttl": 0}, {"preset": 7}, {"left": True}])
def test_invalid_hints_are_ignored_with_a_warning(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture, hints: dict[str, Any]
) -> None:
    half = make()
    store(half, Request("stored", 12), 3)
    ended(half, **{"pin": "system", **hints})
    assert drained(half) and pins(half) == []
    assert "the hints of request r0 are ignored" in caplog.text


def test_a_store_that_refuses_pins_fails_no_request(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    half = make()
    store(half, Request("stored", 12), 3)

    def refused(*_: Any, **__: Any) -> None:
        raise Overloaded("too many pins")

    monkeypatch.setattr(cache(half), "pin", refused)
    ended(half, pin="system")
    assert drained(half) and pins(half) == []
    assert "'system' is not pinned in full: too many pins" in caplog.text
