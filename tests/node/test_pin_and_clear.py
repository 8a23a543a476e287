"""Rule P5: a pin that was acknowledged keeps its chunks, whenever a clear of its namespace runs.

Both run for real, over metadata and a root in memory, each in a thread that stops before a call to them that the test
chooses: so every order of their steps with up to three turns is tried, and no clock decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvstore.census.selection import Selection
from kvstore.core.buffers import Planes
from kvstore.core.namespace import Namespace
from kvstore.core.results import PinRecord
from kvstore.errors import Unavailable
from kvstore.format.keyset import ChunkKeys
from kvstore.format.places import Name
from kvstore.meta.clears import PASSING_S, Clears
from kvstore.meta.keys import Keys
from kvstore.meta.memory import MemoryMetadata
from kvstore.root.memory import MemoryFiles, MemoryRoot
from tests.kit.fake_meta import AheadClock
from tests.kit.stores import SMALL, kv_of, member_on

WAIT_S = 60.0
ALL = 1000
"""More steps than either takes."""
CHUNKS = 2
TOKENS = range(CHUNKS * SMALL.chunk_tokens)
NAMESPACE = Namespace("m", SMALL)


class Actor:
    """A thread that stops before its n-th step until it is let on, and then runs to its end."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._left = 0
        self._stopped = threading.Event()
        self._let_on = threading.Event()
        self.result: object = None
        self.steps = 0
        self.thread = threading.Thread(target=self._run, daemon=True)

    def run_until(self, step: int) -> None:
        """Returns before that step, or at the end."""
        self._left = step
        self.thread.start()
        assert self._stopped.wait(WAIT_S)

    def finish(self) -> None:
        self._let_on.set()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()

    def pass_step(self) -> None:
        if self._let_on.is_set():
            return
        if self.steps == self._left:
            self._stopped.set()
            assert self._let_on.wait(WAIT_S)
            return
        self.steps += 1

    def _run(self) -> None:
        try:
            self.result = self._work()
        except Unavailable as refused:
            self.result = refused
        self._stopped.set()


class Stage:
    """Metadata and a root in memory, whose calls are the steps of the actors."""

    def __init__(self) -> None:
        self.pinning: Actor | None = None
        self.clearing: Actor | None = None
        stage = self

        class Root(MemoryRoot):
            def remove(self, name: Name) -> bool:
                stage.step(stage.clearing)
                return super().remove(name)

        class Metadata(MemoryMetadata):
            def __getattribute__(self, name: str) -> Any:
                if name in ("list", "put", "txn", "grant", "revoke"):
                    actors = (stage.pinning, stage.clearing)
                    current = threading.current_thread()
                    stage.step(next((each for each in actors if each and each.thread is current), None))
                return super().__getattribute__(name)

        self.member = member_on(Root(MemoryFiles()), meta=Metadata())
        self.member.claim_namespace(NAMESPACE)
        self.chain: ChunkKeys = self.member.node.chains.of(NAMESPACE, np.asarray(TOKENS, np.uint32))
        self.member.node.put(self.chain, 0, Planes(kv_of(SMALL, TOKENS), SMALL.section_bytes))

    def step(self, actor: Actor | None) -> None:
        if actor is not None:
            actor.pass_step()

    def pin(self) -> PinRecord:
        return self.member.pin(self.chain, 600.0, "me")

    def there(self) -> int:
        self.member.node.known.clear()
        return self.member.node.match(self.chain)


@contextmanager
def staged() -> Iterator[Stage]:
    stage = Stage()
    try:
        yield stage
    finally:
        stage.member.close()


def clear_namespace(stage: Stage) -> object:
    return stage.member.clear(NAMESPACE)


def clear_selected(stage: Stage) -> object:
    return stage.member.clear_selected(Selection(namespace=NAMESPACE.digest))


def played(clear: Callable[[Stage], object], first: str, pin_steps: int, clear_steps: int) -> tuple[object, int, int]:
    """One order: the pin until its step, the clear until its own (or the other way round), the pin's end, the clear's.

    What became of the pin, and how many steps each took before it stopped.
    """
    with staged() as stage:
        pinning, clearing = Actor(stage.pin), Actor(lambda: clear(stage))
        stage.pinning, stage.clearing = pinning, clearing
        actors = [(pinning, pin_steps), (clearing, clear_steps)]
        for actor, steps in actors if first == "pin" else reversed(actors):
            actor.run_until(steps)
        for actor in (pinning, clearing) if first == "pin" else (clearing, pinning):
            actor.finish()
        if isinstance(pinning.result, PinRecord):
            assert stage.there() * SMALL.chunk_tokens >= pinning.result.tokens, (first, pin_steps, clear_steps)
        else:
            assert isinstance(pinning.result, Unavailable), "refused, and it says so"
        return pinning.result, pinning.steps, clearing.steps


@pytest.mark.parametrize("first", ["pin", "clear"])
@pytest.mark.parametrize("clear", [clear_namespace, clear_selected])
def test_a_pin_keeps_its_chunks_in_every_order_with_a_clear(clear: Callable[[Stage], object], first: str) -> None:
    _, pin_steps, _ = played(clear, "pin", ALL, 0)
    _, _, clear_steps = played(clear, "clear", 0, ALL)
    whole, refused, nothing = 0, 0, 0
    for pin_at in range(pin_steps + 1):
        for clear_at in range(clear_steps + 1):
            result, _, _ = played(clear, first, pin_at, clear_at)
            if isinstance(result, PinRecord):
                whole += result.tokens == len(TOKENS)
                nothing += not result.tokens
            else:
                refused += 1
    assert whole and refused and nothing, "each of these happens"


def test_a_clear_stops_deleting_once_its_order_may_have_ended() -> None:
    clock = AheadClock()
    clears = Clears(MemoryMetadata(), Keys(bytes(16)), clock)
    published = clears.publish(bytes(16), b"{}", 5.0)
    published.check()
    clock.ahead_s += PASSING_S / 2
    with pytest.raises(Unavailable, match="clear again"):
        published.check()
    published.renew(5.0)
    published.check()
    assert clears.in_progress(5.0) == [b"{}"]
    published.done(5.0)
    assert not clears.in_progress(5.0)
    with pytest.raises(Unavailable):
        published.check()
