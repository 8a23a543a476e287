"""The example router before two real vLLM servers that share a root: conversations find more of their KV in memory."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.deploy.examples import answering, load_example
from tests.engines.events.indexer import until
from tests.engines.events.servers import complete, server
from tests.engines.vllm.engines import PYTHON, counters, prompt, transfer

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make engines-test ENGINES=vllm")

router = load_example("router")

TALKS, TURNS = 12, 8
FIRST_TOKENS, TURN_TOKENS = 128, 64
GPU_BLOCKS = 64
"""Blocks of 32 tokens in each engine. Both engines together hold a little more than half of all conversations."""


class RoundRobin(router.Scorer):  # type: ignore[misc, name-defined]
    """Takes the engines in turns."""

    def begin(self, tokens: Sequence[int]) -> str:
        """Returns the next one."""
        self._turn += 1
        engine: str = list(self.indexes)[self._turn % len(self.indexes)]
        return engine

    def end(self, engine: str) -> None:
        """Forgets nothing."""


class EnginesAlone(router.Scorer):  # type: ignore[misc, name-defined]
    """Hears what engines tell of their own memory, and nothing of the store."""

    def apply(self, engine: str, events: Any) -> None:
        """Takes in a part of a batch."""
        super().apply(engine, [event for event in events if event.get("medium") != router.STORAGE])


@pytest.fixture(scope="module")
def engines(workplace: Path, model: Path) -> Iterator[dict[str, list[str]]]:
    """Two servers with little memory and one root: the endpoints of their events by their URLs."""
    found: dict[str, list[str]] = {}
    with ExitStack() as undo:
        for name in ("one", "two"):
            place = transfer({"root": str(workplace / "routed")})
            options = ("--num-gpu-blocks-override", str(GPU_BLOCKS))
            url, ports = undo.enter_context(server(workplace, model, place, *options, name=name))
            found[url] = [f"tcp://127.0.0.1:{port}" for port in ports]
        yield found


def told(scorer: Any, tokens: Sequence[int]) -> bool:
    """True once the scorer has heard that an engine keeps all full blocks of a prompt.

    How soon events come would decide otherwise where the next prompts go.
    """
    with scorer.lock:
        return any(
            index.size and all(index.has(key, stored=False) for key in router.chain(tokens, index.size))
            for index in scorer.indexes.values()
        )


def hits(engines: dict[str, list[str]], scorer: Any, seed: int) -> tuple[int, int]:
    """Tokens of all turns that engines found in their own memory, and those that they loaded from the root."""
    for url, ends in engines.items():
        Thread(target=router.follow, args=(scorer, url, *ends), daemon=True).start()
    names = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
    before = [counters(url) for url in engines]
    order = [talk for talk in range(TALKS) for _ in range(TURNS)]
    random.Random(5).shuffle(order)
    talks = [prompt(seed + talk, FIRST_TOKENS) for talk in range(TALKS)]
    with answering(router.server(scorer, "127.0.0.1", 0)) as url:
        for turn, talk in enumerate(order):
            complete(url, talks[talk], 1)
            until(partial(told, scorer, talks[talk]), "an engine tells what it keeps")
            talks[talk] = talks[talk] + prompt(seed + TALKS + turn, TURN_TOKENS)
    after = [counters(url) for url in engines]
    memory, root = (sum(int(b[name] - a[name]) for a, b in zip(before, after, strict=True)) for name in names)
    return memory, root


def test_conversations_find_more_in_memory_than_in_turns_and_no_less_than_by_events_of_engines_alone(
    engines: dict[str, list[str]],
) -> None:
    (in_turns, _), (alone, _), (routed, loaded) = (
        hits(engines, kind(engines), 1_000 * seed)
        for seed, kind in enumerate((RoundRobin, EnginesAlone, router.Scorer), 1)
    )
    print(f"\ntokens in memory: in turns {in_turns}, by events of engines {alone}, with the store {routed} (+{loaded})")
    assert routed >= 1.2 * in_turns, (routed, in_turns)
    assert routed >= 0.9 * alone, (routed, alone)
    assert loaded > 0, "what no memory held came from the root"
