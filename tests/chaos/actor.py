"""A node of the chaos tests, as a process: ``python -m tests.chaos.actor``. Puts, gets, holds and pins, and checks.

It writes every promise of the store to its journal, and checks every promise and byte all the time. It exits with 3 at
the first broken promise.

The promises: while the session lives in which a hold began, and the hold has not ended, what was once read under it can
be read again. The chunks of an acknowledged pin can be read until it is released or its lease ends. Bytes are always
right.
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.core.buffers import planes_of
from kvstore.engine.coordination import ClusterMember
from kvstore.engine.gc_state import ChunkHold
from kvstore.engine.open import open_member
from kvstore.engine.settings import Limits
from kvstore.errors import HoldBroken, KVStoreError
from kvstore.format import places
from tests.chaos.journal import COUNTS, LONGEST, VIOLATION, Journal
from tests.chaos.prompts import LAYOUT, SPACE, chain_of, kv

log = logging.getLogger(__name__)

HOLDS_MAX = 6
HOLD_S_MAX = 5.0
PINS_MAX = 3
PIN_S = (10, 60)
BREATH_S = 0.002
COUNT_S = 0.5
OWN_REASONS = ("miss_deadline", "miss_shed", "miss_unreadable")
"""Misses that say nothing of the chunk: the process was stopped, or the root did not answer."""


class Violated(Exception):
    """A promise was broken."""


@dataclass(slots=True)
class Held:
    """A hold of this node; ``proven`` chunks of it were read under it."""

    hold: ChunkHold
    number: int
    until_s: float
    proven: int = 0


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pin of this node."""

    id: str
    number: int
    chunks_count: int
    until_s: float


class Actor:
    """The actions of one node, chosen by ``chance``."""

    def __init__(self, member: ClusterMember, journal: Journal, chance: random.Random, prompts: int) -> None:
        self._member = member
        self._node = member.node
        self._cache = Store(LocalTransport(member)).namespace(SPACE.name, LAYOUT)
        self._journal = journal
        self._chance = chance
        self._prompts = prompts
        self._held: list[Held] = []
        self._pinned: list[Pinned] = []
        self.counts: Counter[str] = Counter()
        self._longest_s: dict[str, float] = {}
        self._actions = [
            (self._put, 30),
            (self._get, 30),
            (self._take, 10),
            (self._check_held, 30),
            (self._release, 4),
            (self._pin, 3),
            (self._unpin, 1),
        ]

    def act(self) -> None:
        """One action. Raises Violated."""
        self._forget_ended()
        action = self._chance.choices([each for each, _ in self._actions], [weight for _, weight in self._actions])[0]
        name, began_s = action.__name__.strip("_"), time.monotonic()
        try:
            action()
            self.counts[name] += 1
        except KVStoreError as error:
            self.counts[f"{name}: {type(error).__name__}"] += 1
        finally:
            self._longest_s[name] = max(self._longest_s.get(name, 0.0), time.monotonic() - began_s)

    def count(self) -> None:
        """Notes the counts until now."""
        stats = self._node.counters.snapshot()
        for name in ("sessions_lost", "watches_lost", "announcements", "chunks_condemned", "quarantine_restored"):
            self.counts[name] = stats[name]
        self.counts.update({name: count - self.counts[name] for name, count in stats.items() if "damage" in name})
        self._journal.note(COUNTS, **self.counts)
        self._journal.note(LONGEST, **self._longest_s)

    # Actions

    def _any_prompt(self) -> int:
        # A few prompts are asked for often, most rarely.
        return int(self._prompts * self._chance.random() ** 2)

    def _put(self) -> None:
        number = self._any_prompt()
        self._cache.put(chain_of(number).tokens, kv(number))

    def _get(self) -> None:
        number = self._any_prompt()
        count, found = self._cache.get(chain_of(number).tokens)
        self._same(number, found, count, "get")

    def _take(self) -> None:
        if len(self._held) >= HOLDS_MAX:
            return
        number, seconds = self._any_prompt(), self._chance.uniform(0.1, HOLD_S_MAX)
        hold = self._node.hold(chain_of(number), seconds)
        if not hold.count:
            self._node.holds.release(hold)
            return
        held = Held(hold, number, hold.ends_s)
        self._held.append(held)
        if hold.born is None:
            self.counts["holds unprotected"] += 1
        self._journal.note("held", hold=hold.id.hex(), number=number, chunks=hold.count, until_s=hold.ends_s)
        self._read(held)

    def _check_held(self) -> None:
        if self._held:
            self._read(self._chance.choice(self._held))

    def _release(self) -> None:
        if self._held:
            self._end(self._held.pop(self._chance.randrange(len(self._held))))

    def _pin(self) -> None:
        if len(self._pinned) >= PINS_MAX:
            return
        number, ttl_s, began_s = self._any_prompt(), self._chance.randint(*PIN_S), time.monotonic()
        record = self._member.pin(chain_of(number), ttl_s, "chaos")
        if record.id:
            # The lease was granted after ``began_s``, so it ends no earlier than this.
            pin = Pinned(record.id, number, record.tokens // LAYOUT.chunk_tokens, began_s + ttl_s)
            self._journal.note("pinned", id=pin.id, number=number, chunks=pin.chunks_count, until_s=pin.until_s)
            self._pinned.append(pin)
            self.counts["pins acknowledged"] += 1

    def _unpin(self) -> None:
        if self._pinned:
            pin = self._pinned.pop(self._chance.randrange(len(self._pinned)))
            self._journal.note("unpinning", id=pin.id)
            self._member.unpin(pin.id)

    # Checks

    def _read(self, held: Held) -> None:
        """Reads a hold, and reports a chunk that was there under this hold and is gone."""
        hold = held.hold
        try:
            count, own = self._read_hold(hold, held.number)
            if own and count < held.proven:
                count, own = self._read_hold(hold, held.number)
        except HoldBroken:
            self._held = [each for each in self._held if each is not held]
            self.counts["holds lost"] += 1
            return
        if count >= held.proven:
            held.proven = count
            if count < hold.count and not own:
                self.counts["held with a gap"] += 1  # matching looks only at some chunks of a prompt
        elif own or not self._is_in_force(hold):
            self.counts["held reads cut short"] += 1
        else:
            self._broken("held chunk missing", held.number, count, hold=hold.id.hex(), proven=held.proven)

    def _read_hold(self, hold: ChunkHold, number: int) -> tuple[int, bool]:
        """Returns how many leading chunks can be read, and whether a shortfall is our own. Raises Violated."""
        before = self._own_misses()
        if self._chance.random() < 0.2:
            views = self._node.view(hold)
            found = np.concatenate(views, axis=2) if views else np.empty(LAYOUT.shape(0), LAYOUT.numpy_dtype)
            count = len(views)
        else:
            found = np.empty(LAYOUT.shape(hold.tokens), LAYOUT.numpy_dtype)
            count = self._node.read(hold, planes_of(found, LAYOUT))
        self._same(number, found, count * LAYOUT.chunk_tokens, "hold")
        self.counts["held reads"] += 1
        return count, self._own_misses() != before

    def _is_in_force(self, hold: ChunkHold) -> bool:
        """True if the hold protects now. It cannot come back: so it did at any time before."""
        try:
            self._node.holds.check(hold)
        except HoldBroken:
            return False
        return hold.born is not None

    def _same(self, number: int, found: np.ndarray[tuple[int, ...], np.dtype[np.int8]], count: int, what: str) -> None:
        if not np.array_equal(found[:, :, :count], kv(number)[:, :, :count]):
            self._journal.note(VIOLATION, what=f"wrong bytes from {what}", number=number, tokens=count)
            raise Violated
        self.counts["chunks verified"] += count // LAYOUT.chunk_tokens

    def _broken(self, what: str, number: int, index: int, **details: object) -> None:
        name = places.chunk(chain_of(number).addresses[index], SPACE.id, self._node.identity.shard_bits)
        self._journal.note(VIOLATION, what=what, number=number, index=index, name=name, **details)
        raise Violated

    def _own_misses(self) -> int:
        stats = self._node.counters.snapshot()
        return sum(stats[name] for name in OWN_REASONS)

    def _forget_ended(self) -> None:
        now_s = time.monotonic()
        for held in [each for each in self._held if each.until_s <= now_s]:
            self._held.remove(held)
            self._end(held)
        self._pinned = [each for each in self._pinned if each.until_s > now_s]

    def _end(self, held: Held) -> None:
        self._journal.note("released", hold=held.hold.id.hex())
        self._node.holds.release(held.hold)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--etcd")
    parser.add_argument("--breath", type=float, default=BREATH_S)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--prompts", type=int, required=True)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    member: ClusterMember | None = None
    while member is None:
        if asked:
            return 0
        try:
            member = open_member(given.root, given.etcd, limits=Limits(hold_max_s=20.0))
        except KVStoreError as error:
            log.warning("not open yet: %s", error)
            time.sleep(0.2)
    journal = Journal(given.journal)
    chance = random.Random(given.journal.stem)
    actor = Actor(member, journal, chance, given.prompts)
    counted_s = 0.0
    try:
        while not asked:
            actor.act()
            time.sleep(given.breath)
            if time.monotonic() - counted_s > COUNT_S:
                counted_s = time.monotonic()
                actor.count()
    except Violated:
        actor.count()
        return 3
    actor.count()
    member.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
