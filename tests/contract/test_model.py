"""A store against a dictionary: random public calls, eviction, corruption and restarts, by every transport.

The promises are the assertions: no wrong bytes; a match is not more than a read returns; the first writer wins; a held
or pinned chunk is not deleted; at the end nothing is held, pinned, staged or referenced.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvstore.client import Cache, Hold, Pin
from kvstore.errors import HoldBroken
from tests.kit.backends import WAYS, Backend, backend
from tests.kit.stores import TINY, kv_of, same

pytestmark = pytest.mark.slow

Prompt = tuple[int, ...]
"""A prompt: the number of each of its chunks. Prompts that begin alike share chunks."""
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
SEEDS = st.sampled_from([b"", b"other"])
SIZE = TINY.chunk_tokens


def tokens_of(path: Prompt) -> npt.NDArray[np.int64]:
    """The tokens of a prompt."""
    return np.repeat(np.asarray(path, np.int64), SIZE)


def prefixes(path: Prompt) -> list[Prompt]:
    return [path[: count + 1] for count in range(len(path))]


@dataclass
class Held:
    """A hold and the bytes that each of its chunks may have."""

    hold: Hold
    path: Prompt
    seeds: dict[Prompt, set[bytes]]
    is_intact: bool = True


@dataclass
class Pinned:
    pin: Pin
    path: Prompt


class Model(RuleBasedStateMachine):
    """``seeds`` has the writers whose bytes a chunk may have; ``stored`` the chunks that must be readable."""

    way = "embedded"
    encrypted = False
    folder: Path

    @initialize(posix=st.booleans())
    def begin(self, posix: bool) -> None:
        self.backend: Backend = backend(self.way, self.folder, posix=posix, encrypted=self.encrypted, layout=TINY)
        self.cache: Cache = self.backend.cache()
        self.seeds: dict[Prompt, set[bytes]] = {}
        self.stored: set[Prompt] = set()
        self.rotten: set[Prompt] = set()
        self.holds: list[Held] = []
        self.pins: list[Pinned] = []

    # Calls

    @rule(path=PROMPTS, seed=SEEDS)
    def put(self, path: Prompt, seed: bytes) -> None:
        result = self.cache.put(tokens_of(path), kv_of(TINY, tokens_of(path), seed))
        assert result.tokens_present == len(path) * SIZE
        assert result.chunks_written + result.chunks_found == len(path)
        for each in prefixes(path):
            if each not in self.stored:
                self.seeds.setdefault(each, set()).add(seed)
                if each not in self.rotten:
                    self.stored.add(each)

    @rule(path=PROMPTS)
    def match_and_get(self, path: Prompt) -> None:
        matched = self.cache.match(tokens_of(path)) // SIZE
        tokens, array = self.cache.get(tokens_of(path))
        count = tokens // SIZE
        self.check_bytes(path, count, array, self.seeds)
        assert count >= self.certain(path)
        if self.certain(path) == self.possible(path):
            assert matched == count

    @rule(path=PROMPTS)
    def hold(self, path: Prompt) -> None:
        hold = self.cache.hold(tokens_of(path))
        assert hold.tokens // SIZE >= self.certain(path)
        held = path[: hold.tokens // SIZE]
        self.holds.append(Held(hold, held, {each: set(self.seeds.get(each, ())) for each in prefixes(held)}))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def read_held(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.holds))
        out = np.empty(TINY.shape(len(held.path) * SIZE), TINY.numpy_dtype)
        try:
            count = held.hold.read_into(out) // SIZE
        except HoldBroken:
            assert not held.is_intact
            return
        seeds = {each: held.seeds[each] | self.seeds.get(each, set()) for each in prefixes(held.path)}
        self.check_bytes(held.path, count, out, seeds)
        if held.is_intact and not self.rotten & set(prefixes(held.path)):
            assert count == len(held.path), "a held chunk is gone"

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.holds))
        self.holds.remove(held)
        held.hold.release()

    @rule(path=PROMPTS)
    def pin(self, path: Prompt) -> None:
        pin = self.cache.pin(tokens_of(path), ttl=600)
        count = pin.tokens // SIZE
        assert count >= self.certain(path)
        if count:
            self.pins.append(Pinned(pin, path[:count]))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pinned = data.draw(st.sampled_from(self.pins))
        self.pins.remove(pinned)
        assert self.backend.store.unpin(pinned.pin.id)

    @rule(path=PROMPTS)
    def refcount(self, path: Prompt) -> None:
        live = sum(pinned.path[: len(path)] == path for pinned in self.pins)
        assert self.cache.refcount(tokens_of(path)) == live

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        for path in list(self.seeds):
            if not self.is_pinned(path):
                del self.seeds[path]
                self.stored.discard(path)
                self.rotten.discard(path)
        for held in self.holds:
            held.is_intact = held.is_intact and all(map(self.is_pinned, prefixes(held.path)))

    # Events

    @rule()
    def evict(self) -> None:
        """A collector deletes all that it may."""
        self.backend.settle()
        kept = [each for each in self.seeds if self.is_pinned(each) or self.is_held(each)]
        before = {each for each in kept if self.is_on_root(each)}
        self.backend.sweep([self.cache.namespace])
        assert all(map(self.is_on_root, before)), "a held or pinned chunk is deleted"
        for path in list(self.stored):
            if not self.is_on_root(path):
                self.stored.discard(path)
                if not self.backend.has_memory:
                    self.seeds.pop(path, None)

    @rule()
    def evict_memory(self) -> None:
        self.backend.settle()
        self.backend.evict_memory()

    @precondition(lambda self: self.stored)
    @rule(data=st.data(), at=st.sampled_from([0, 9, 700, 4090, 4096, 4099, 4127]))
    def corrupt(self, data: st.DataObject, at: int) -> None:
        """A bit of a chunk's file changes. The chunk may be a miss from now on, and may be written again."""
        self.backend.settle()
        path = data.draw(st.sampled_from(sorted(self.stored)))
        name = self.backend.names(self.cache, tokens_of(path))[-1]
        if self.backend.plain_root.stat(name) is not None:
            self.backend.corrupt_root(name, at)
            self.rotten.add(path)
            self.stored.discard(path)

    @precondition(lambda self: self.stored)
    @rule(data=st.data(), at=st.integers(4096, 4127))
    def corrupt_memory(self, data: st.DataObject, at: int) -> None:
        """A bit of an image in memory changes: the root still has the chunk."""
        self.backend.settle()
        path = data.draw(st.sampled_from(sorted(self.stored)))
        self.backend.corrupt_memory(self.cache, tokens_of(path), len(path) - 1, at)

    @rule()
    def restart(self) -> None:
        self.end_holds()
        self.backend.restart()
        self.cache = self.backend.cache()

    # The model

    def certain(self, path: Prompt) -> int:
        """Leading chunks that must be readable."""
        return next((at for at, each in enumerate(prefixes(path)) if each not in self.stored), len(path))

    def possible(self, path: Prompt) -> int:
        """Leading chunks that may be readable."""
        return next((at for at, each in enumerate(prefixes(path)) if not self.seeds.get(each)), len(path))

    def is_pinned(self, path: Prompt) -> bool:
        return any(pinned.path[: len(path)] == path for pinned in self.pins)

    def is_held(self, path: Prompt) -> bool:
        return any(held.is_intact and held.path[: len(path)] == path for held in self.holds)

    def is_on_root(self, path: Prompt) -> bool:
        return self.backend.on_root(self.cache, tokens_of(path))[-1]

    def check_bytes(self, path: Prompt, count: int, array: npt.NDArray[Any], seeds: dict[Prompt, set[bytes]]) -> None:
        """Asserts that each chunk has the bytes of one of its writers."""
        assert count <= len(path)
        for at, each in enumerate(prefixes(path)[:count]):
            part = array[:, :, at * SIZE : (at + 1) * SIZE]
            wanted = (kv_of(TINY, tokens_of(each), seed)[:, :, at * SIZE :] for seed in seeds.get(each, ()))
            assert any(same(np.ascontiguousarray(part), np.ascontiguousarray(kv)) for kv in wanted), "wrong bytes"

    def end_holds(self) -> None:
        for held in self.holds:
            held.hold.release()
        self.holds.clear()

    def teardown(self) -> None:
        if not hasattr(self, "backend"):
            return
        try:
            self.end_holds()
            for pinned in self.pins:
                pinned.pin.release()
            self.backend.settle()
            self.backend.assert_idle(allowed=["quarantine"])
        finally:
            self.backend.close()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("way", WAYS)
def test_store_under_random_calls_keeps_its_promises(tmp_root: Path, way: str, encrypted: bool) -> None:
    machine = type("Model", (Model,), {"way": way, "encrypted": encrypted, "folder": tmp_root})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=6,
            stateful_step_count=25,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
