"""One caller of a replay: it matches, gets and compares the hits, puts the misses, and counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol, TypeVar

import numpy as np

from kvstore.errors import Overloaded
from kvstore.replay.content import Content, KvBytes, Scratch, Words
from kvstore.replay.trace import BLOCK_TOKENS, Request
from kvstore.results import PutResult
from kvstore.tokens import TokenArray
from kvstore.writes import WriteModeName

T = TypeVar("T")

DIFFERENCES_MAX = 10
OVERLOADED_TRIES_MAX = 120
OVERLOADED_PAUSE_S = 0.1
"""A replay must store all: it puts again for 12 s, in which a collector that has just started counts the root."""
POISON = np.uint64(0x5A5A_5A5A_5A5A_5A5A)
"""Fills memory before a get, so that bytes that the store claims and never wrote count as wrong."""


class ReplayCache(Protocol):
    """The calls that a replay makes; ``kvstore.client.Cache`` has them."""

    def match(self, tokens: TokenArray, *, counts: bool = True) -> int: ...

    def get(self, tokens: TokenArray, out: KvBytes) -> int: ...

    def put(self, tokens: TokenArray, kv: KvBytes, prefix: int, *, write: WriteModeName) -> PutResult: ...


@dataclass(slots=True)
class Tally:
    """Counts of one caller. ``differences`` are the first few hits that were not as expected.

    ``tokens`` are those of full blocks, as in the counters of a store: no store has the rest of a prompt.
    """

    requests: int = 0
    tokens: int = 0
    tokens_matched: int = 0
    tokens_got: int = 0
    wrong_bytes: int = 0
    wrong_requests: int = 0
    short_gets: int = 0
    short_puts: int = 0
    hit_differences: int = 0
    not_found: int = 0
    chunks_written: int = 0
    chunks_found: int = 0
    bytes_put: int = 0
    bytes_got: int = 0
    overloaded: int = 0
    match_s: float = 0.0
    get_s: float = 0.0
    put_s: float = 0.0
    differences: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Adds another caller's counts."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        del self.differences[DIFFERENCES_MAX:]

    def note(self, difference: str) -> None:
        """Keeps a difference if there is room."""
        if len(self.differences) < DIFFERENCES_MAX:
            self.differences.append(difference)


class Lane:
    """Works through requests one after the other. For one thread."""

    def __init__(self, cache: ReplayCache, content: Content, expected: Mapping[int, int] | None) -> None:
        """``expected`` are the hits of each request in blocks; None if other callers make them undefined."""
        self.tally = Tally()
        self._cache = cache
        self._content = content
        self._expected = expected
        self._got = Scratch(content)
        self._put = Scratch(content)

    def run(self, requests: Iterable[Request], done: Callable[[], bool]) -> None:
        """Serves all requests; ``done`` is called after each and says whether to go on."""
        for request in requests:
            self.serve(request)
            if not done():
                return

    def serve(self, request: Request) -> None:
        """Serves one request."""
        tally, content = self.tally, self._content
        tokens, seeds = content.tokens(request), content.seeds(request)
        matched, seconds = _timed(lambda: self._cache.match(tokens))
        tally.match_s += seconds
        tally.requests += 1
        tally.tokens += request.full_blocks * BLOCK_TOKENS
        tally.tokens_matched += matched
        self._check_hits(request, matched)
        got = self._read(request, tokens, seeds, min(matched, len(seeds) * BLOCK_TOKENS))
        if got < len(seeds) * BLOCK_TOKENS:
            self._write(request, tokens, seeds, got)

    def find(self, request: Request) -> None:
        """Counts the request if a full block of it is not in the store; called after all requests were put."""
        matched = self._cache.match(self._content.tokens(request), counts=False)
        if matched != request.full_blocks * BLOCK_TOKENS:
            self.tally.not_found += 1
            self.tally.note(
                f"request {request.number}: {matched} tokens in the store after the replay, "
                f"expected {request.full_blocks * BLOCK_TOKENS}"
            )

    def _check_hits(self, request: Request, matched: int) -> None:
        if self._expected is None:
            return
        expected = self._expected[request.number] * BLOCK_TOKENS
        if matched != expected:
            self.tally.hit_differences += 1
            self.tally.note(f"request {request.number}: {matched} tokens matched, expected {expected}")

    def _read(self, request: Request, tokens: TokenArray, seeds: Words, matched: int) -> int:
        """Reads and compares the matched tokens; returns their number."""
        if not matched:
            return 0
        tally, content = self.tally, self._content
        memory = self._got.blocks(matched // BLOCK_TOKENS)
        memory.fill(POISON)
        got, seconds = _timed(lambda: self._cache.get(tokens, out=content.shaped(memory)))
        tally.get_s += seconds
        tally.tokens_got += got
        tally.bytes_got += got * content.layout.kv_bytes_per_token
        if got != matched:
            tally.short_gets += 1
            tally.note(f"request {request.number}: {got} tokens read, {matched} had matched")
        blocks = min(got, matched) // BLOCK_TOKENS
        wrong = content.wrong_bytes(seeds[:blocks], memory[:, :blocks])
        if wrong:
            tally.wrong_bytes += wrong
            tally.wrong_requests += 1
            tally.note(f"request {request.number}: {wrong} wrong bytes in {got} tokens")
        return blocks * BLOCK_TOKENS

    def _write(self, request: Request, tokens: TokenArray, seeds: Words, prefix: int) -> None:
        tally, content = self.tally, self._content
        missing = seeds[prefix // BLOCK_TOKENS :]
        memory = self._put.blocks(len(missing))
        content.fill(missing, memory)
        full = tokens[: len(seeds) * BLOCK_TOKENS]
        kv = content.shaped(memory)
        result, seconds = _timed(
            lambda: self._patiently(lambda: self._cache.put(full, kv, prefix=prefix, write="through"))
        )
        tally.put_s += seconds
        tally.chunks_written += result.chunks_written
        tally.chunks_found += result.chunks_found
        tally.bytes_put += result.bytes_written
        if result.tokens_present != len(full):
            tally.short_puts += 1
            refused = f", refused: {result.reason}" if result.reason else ""
            tally.note(
                f"request {request.number}: {result.tokens_present} tokens present after a put of {len(full)}{refused}"
            )

    def _patiently(self, call: Callable[[], PutResult]) -> PutResult:
        """Puts again while the store has too much to do, a bounded number of times."""
        for _ in range(OVERLOADED_TRIES_MAX):
            result = call()
            if result.reason != Overloaded.reason:
                return result
            self.tally.overloaded += 1
            time.sleep(OVERLOADED_PAUSE_S)
        return call()


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    start_s = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start_s
