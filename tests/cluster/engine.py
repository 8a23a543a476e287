"""An engine: serves requests of the trace without end, compares every byte, pins: ``python -m tests.cluster.engine``.

Its journal has a line for each request: its hits, its puts, its errors. Only SIGTERM ends it: errors of the store are
counted, and wrong bytes are for the scenario to see.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

from kvstore.client.cache import Cache
from kvstore.client.store import Store
from kvstore.core.address import TokenArray
from kvstore.core.results import PutResult
from kvstore.core.write_mode import WriteModeName
from kvstore.errors import KVStoreError
from kvstore.replay import TraceRequest, load_trace
from kvstore.replay.runner import KvBytes, Lane
from tests.chaos.journal import Journal
from tests.cluster.load import CONTENT, NAMESPACE, reach_of, reach_options

BREATH_S = 0.45
"""Between two requests: the cores are shared with all hosts."""
PIN_EVERY, PIN_EVERY_FIRST = 16, 3
"""Requests from one pin to the next, on average, with and without all the pins that it wants."""
PINS_MAX = 4
PIN_BLOCKS_MAX = 24
PIN_TTL_S = 900.0
OPEN_AGAIN_S = 0.5
SERVED, PINNED, UNPINNING, PIN_REFUSED = "served", "pinned", "unpinning", "pin refused"


class Impatient:
    """A cache whose puts are not repeated when they are shed: an engine has other things to do.

    ``doing`` is the last call, which an error belongs to.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.shed = 0
        self.doing = ""

    def match(self, tokens: TokenArray, *, counts: bool = True) -> int:
        self.doing = "match"
        return self._cache.match(tokens, counts=counts)

    def get(self, tokens: TokenArray, out: KvBytes) -> int:
        self.doing = "get"
        return self._cache.get(tokens, out=out)

    def put(self, tokens: TokenArray, kv: KvBytes, prefix: int, *, write: WriteModeName) -> PutResult:
        """Puts as the store does: nothing here expects a chunk to be on the root at once."""
        self.doing = "put"
        result = self._cache.put(tokens, kv, prefix)
        if result.reason:
            self.shed += 1
        return replace(result, reason="")  # the replay is not to put again


class Engine:
    """Serves one request after the other."""

    def __init__(self, store: Store, requests: list[TraceRequest], journal: Journal, chance: random.Random) -> None:
        self._store = store
        self._pinning = store.namespace(NAMESPACE, CONTENT.layout)
        self._cache = Impatient(self._pinning)
        self._requests = requests
        self._journal = journal
        self._chance = chance
        self._pins: deque[str] = deque()

    def serve(self) -> None:
        """One request, noted; now and then a pin on it."""
        # A few prompts are asked for often, most rarely.
        request = self._requests[int(len(self._requests) * self._chance.random() ** 2)]
        lane, self._cache.shed, error = Lane(self._cache, CONTENT, None), 0, None
        began_s = time.monotonic()
        try:
            lane.serve(request)
        except KVStoreError as failure:
            error = f"{self._cache.doing}: {type(failure).__name__}: {failure}"
        tally = lane.tally
        self._journal.note(
            SERVED,
            number=request.number,
            took_s=round(time.monotonic() - began_s, 3),
            blocks=request.full_blocks,
            got=tally.tokens_got,
            wrong=tally.wrong_bytes,
            shed=self._cache.shed or tally.short_puts,
            error=error,
        )
        every = PIN_EVERY if len(self._pins) >= PINS_MAX else PIN_EVERY_FIRST
        if error is None and request.full_blocks <= PIN_BLOCKS_MAX and self._chance.random() < 1 / every:
            self._pin(request)

    def _pin(self, request: TraceRequest) -> None:
        try:
            while len(self._pins) >= PINS_MAX:
                oldest = self._pins.popleft()
                # Before it ends: an auditor that misses its chunks looks here again before it complains.
                self._journal.note(UNPINNING, id=oldest)
                self._store.unpin(oldest)
            pin = self._pinning.pin(CONTENT.tokens(request), PIN_TTL_S, "engine")
        except KVStoreError as failure:
            self._journal.note(PIN_REFUSED, error=f"pin: {type(failure).__name__}: {failure}")
            return
        if pin.id:
            self._journal.note(PINNED, id=pin.id, number=request.number, tokens=pin.tokens)
            self._pins.append(pin.id)


def main() -> int:
    parser = argparse.ArgumentParser()
    reach_options(parser)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    given = parser.parse_args()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    requests, journal = load_trace(given.trace), Journal(given.journal)
    while not ended.is_set():
        try:
            with reach_of(given).open() as store:
                engine = Engine(store, requests, journal, random.Random())
                while not ended.wait(BREATH_S):
                    engine.serve()
        except KVStoreError as failure:  # its host has just been switched on: nobody may be there yet
            journal.note(SERVED, took_s=0.0, error=f"open: {type(failure).__name__}: {failure}")
            ended.wait(OPEN_AGAIN_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
