"""Branches that sessions of vLLM abandon: what the store is told, from the requests that the scheduler sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.errors import Unavailable
from tests.kit.cases import for_each
from tests.kit.patience import eventually
from tests.kit.vllm_connector import Request, cache, halves


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    with halves() as found:
        yield found


class Engine:
    """A scheduler's half, and what it tells the store to supersede."""

    def __init__(self, half: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.half = half
        self.told: list[tuple[list[bytes], float]] = []
        self._number = 0
        monkeypatch.setattr(cache(half), "supersede", lambda keys, unused: self.told.append((list(keys), unused)))

    def begin(self, text: str, session: str | None = "s", **said: Any) -> Request:
        """A request whose blocks are the letters; what is behind a colon it generates."""
        prompt, _, generated = text.partition(":")
        self._number += 1
        request = Request(f"r{self._number}", 4 * len(prompt), session_id=session, **said)
        request.block_hashes = hashes(prompt + generated)
        self.half.arrived(request)
        return request

    def run(self, text: str, session: str | None = "s", **said: Any) -> list[bytes]:
        """Runs a request to its end; returns the keys that were told with it."""
        before = len(self.told)
        self.half.finished(self.begin(text, session, **said))
        assert self.half._branches._thread.drain(60.0)
        return [key for keys, _ in self.told[before:] for key in keys]


def hashes(text: str) -> list[bytes]:
    return [text[: at + 1].encode().rjust(32, b".") for at in range(len(text))]


def keys(text: str, first: int) -> list[bytes]:
    return [each + b"\0" for each in hashes(text)[first:]]


@pytest.fixture
def engine(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(make(), monkeypatch)


def test_a_session_that_returns_supersedes_the_fork_behind_what_both_share(engine: Engine) -> None:
    assert engine.run("sabc") == engine.run("saxy:z") == []
    assert engine.run("sabc:d") == keys("saxyz", 2)
    (_, unused), *more = engine.told
    assert unused == 0.0 and not more, "the last blocks may have come into the store after the request's end"


def test_a_hint_names_the_session_and_says_that_it_left_its_other_branches(engine: Engine) -> None:
    engine.run("sabc", None, kv_transfer_params={"kvstore": {"session": "t"}})
    hinted = SimpleNamespace(
        actions=[SimpleNamespace(action_type="kvstore", payload={"session": "t", "supersede": True})]
    )
    assert engine.run("sq", None, kv_hints=hinted) == keys("sabc", 1)


@for_each("wrong", [{"supersede": "yes"}, {"supersede": 1}, {"session": 7}, {"session": "s" * 257}, {"left": True}])
def test_words_that_make_no_sense_are_left_out(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    engine = Engine(make(), monkeypatch)
    engine.run("sabc")
    assert engine.run("sq", kv_transfer_params={"kvstore": wrong}) == []
    assert engine.run("sabcd") == keys("sq", 1), "the session is still known"


def test_keys_of_replaced_weights_are_not_taken_for_those_of_before(engine: Engine) -> None:
    engine.run("sabc")
    engine.half.reset()
    engine.run("saxy")
    assert engine.run("sabcd") == [], "it has begun anew"


def test_a_store_that_does_not_answer_fails_no_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def silent(keys: Any, unused: float) -> None:
        raise Unavailable("nobody answers")

    monkeypatch.setattr(cache(engine.half), "supersede", silent)
    caplog.set_level("INFO", "kvstore.connectors.vllm.hints")
    engine.run("sabc")
    engine.run("sq")
    assert engine.run("sabcd") == []
    eventually(lambda: "an abandoned branch stays as it is: nobody answers" in caplog.text)
