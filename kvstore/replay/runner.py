"""Replays a trace against a store: contents, callers, and the report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, fields
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.client.cache import Cache
from kvstore.client.store import Store
from kvstore.core.address import TokenArray
from kvstore.core.layout import Layout
from kvstore.core.results import PutResult
from kvstore.errors import InvalidRequest, Overloaded
from kvstore.replay.trace import BLOCK_TOKENS, TraceRequest

# Tokens and KV of a trace: pure functions of its hash ids, so that a store's answers can be checked byte by byte.
#
# A block's tokens follow from its hash id alone, so that prompts that share a prefix in the trace share one here. Its
# KV follows from its id and all ids before it, as in a real model, so that a chunk served under another prefix shows.


Words = npt.NDArray[np.uint64]
KvBytes = npt.NDArray[np.int8]

SECTIONS = 4
"""K and V of two layers: the smallest geometry in which sections and layers can be mixed up."""
BYTES_PER_TOKEN_MAX = 1 << 16

# The finaliser of splitmix64 (Steele, Lea, Flood 2014): neighbouring inputs give unrelated outputs.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_POSITIONS = np.arange(BLOCK_TOKENS, dtype=np.uint64)[None, :]
_VOCABULARY_SHIFT = np.uint64(64 - 17)
"""Leaves 17 bits: token ids from 0 to 131,071."""


def replay_layout(bytes_per_token: int) -> Layout:
    """A layout whose KV has ``bytes_per_token`` bytes a token and whose chunks are a trace's blocks.

    Raises InvalidRequest unless it is a multiple of 4 (K and V of two layers) from 4 to 65,536.
    """
    if not 0 < bytes_per_token <= BYTES_PER_TOKEN_MAX or bytes_per_token % SECTIONS:
        raise InvalidRequest(
            f"bytes per token {bytes_per_token}: expected a multiple of {SECTIONS} up to {BYTES_PER_TOKEN_MAX}"
        )
    return Layout(layers=2, kv_heads=1, head_dim=bytes_per_token // SECTIONS, dtype="int8", chunk_tokens=BLOCK_TOKENS)


class Content:
    """The tokens and the KV of a trace's ids. Immutable, thread-safe."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._words = layout.section_bytes // 8
        self._table: Words = np.random.Generator(np.random.Philox(0)).integers(
            0, 1 << 64, size=(SECTIONS, 1, self._words), dtype=np.uint64
        )

    def blocks(self, count: int) -> Words:
        """Returns memory for ``count`` blocks, of shape ``(4, count, words a section)``, with arbitrary content."""
        return np.empty((SECTIONS, count, self._words), np.uint64)

    def tokens(self, request: TraceRequest) -> TokenArray:
        """Returns all ``input_length`` tokens of a prompt, including a part block."""
        ids = np.array(request.hash_ids, dtype=np.uint64)[:, None]
        mixed = ids * np.uint64(BLOCK_TOKENS) + _POSITIONS
        mixed *= _GOLDEN
        mixed ^= mixed >> np.uint64(30)
        mixed *= _MIX_1
        mixed ^= mixed >> np.uint64(27)
        mixed *= _MIX_2
        mixed >>= _VOCABULARY_SHIFT
        return mixed.astype(np.uint32).reshape(-1)[: request.input_length]

    def seeds(self, request: TraceRequest) -> Words:
        """Returns one pair of words per full block, of shape ``(full_blocks, 2)``, chained over the ids up to it."""
        state, packed = bytes(8), bytearray()
        for hash_id in request.hash_ids[: request.full_blocks]:
            state = blake2b(state + hash_id.to_bytes(8, "little"), digest_size=16, person=b"kvstore.replay").digest()
            packed += state
        return np.frombuffer(bytes(packed), dtype="<u8").reshape(-1, 2)

    def fill(self, seeds: Words, out: Words) -> None:
        """Writes the KV of the blocks with these seeds to ``out``, of shape ``(4, len(seeds), words a section)``.

        Word j of a block is ``table[j] * (a | 1) + b``: with the table fixed and random, blocks of different seeds
        differ in every place, and so do the places of one block.
        """
        np.multiply(self._table, (seeds[:, 0] | np.uint64(1))[None, :, None], out=out)
        out += seeds[:, 1][None, :, None]

    def shaped(self, words: Words) -> KvBytes:
        """Views words ``(4, n, words a section)`` as KV of shape ``(2, 2, n * 512, 1, head_dim)``, without a copy."""
        return words.view(np.int8).reshape(self.layout.shape(words.shape[1] * BLOCK_TOKENS))

    def wrong_bytes(self, seeds: Words, got: Words) -> int:
        """Returns the number of bytes in ``got``, shaped as in ``fill``, that differ from those of the seeds."""
        wrong = 0
        step = max(1, (1 << 20) // (8 * SECTIONS * self._words))
        scratch = self.blocks(step)
        for start in range(0, len(seeds), step):
            part = seeds[start : start + step]
            expected, found = scratch[:, : len(part)], got[:, start : start + len(part)]
            self.fill(part, expected)
            if not np.array_equal(expected, found):
                wrong += int(np.count_nonzero(expected.view(np.uint8) != found.view(np.uint8)))
        return wrong


# The expected hits of a trace when nothing is ever evicted: a trie over hash ids, without the store.
#
# Independent of tokens, addresses and KV on purpose: the store's answers are compared with it.


@dataclass(frozen=True, slots=True)
class Expectation:
    """The hits of requests served one after the other: full blocks, by the request's number."""

    hits: dict[int, int]
    chunks_unique: int

    @property
    def blocks(self) -> int:
        """Number of full blocks that are hits, over all requests."""
        return sum(self.hits.values())


def expect(requests: Iterable[TraceRequest]) -> Expectation:
    """Returns the hits of each request, an unbroken run of full blocks from the first on, and the chunks stored."""
    nodes: dict[tuple[int, int], int] = {}
    hits: dict[int, int] = {}
    for request in requests:
        node, count, unbroken = 0, 0, True
        for hash_id in request.hash_ids[: request.full_blocks]:
            step = (node, hash_id)
            found = nodes.get(step)
            unbroken = unbroken and found is not None
            count += unbroken
            node = nodes.setdefault(step, len(nodes) + 1)
        hits[request.number] = count
    return Expectation(hits, len(nodes))


# One caller of a replay: it matches, gets and compares the hits, puts the misses, and counts.


T = TypeVar("T")

DIFFERENCES_MAX = 10
OVERLOADED_TRIES_MAX = 120
OVERLOADED_PAUSE_S = 0.1
"""A replay must store all: it puts again for 12 s, in which a collector that has just started counts the root."""
POISON = np.uint64(0x5A5A_5A5A_5A5A_5A5A)
"""Fills memory before a get, so that bytes that the store claims and never wrote count as wrong."""


@dataclass(slots=True)
class ReplayCounts:
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

    def add(self, other: ReplayCounts) -> None:
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

    def __init__(
        self,
        cache: Cache,
        content: Content,
        expected: Mapping[int, int] | None,
        pause_s: float = OVERLOADED_PAUSE_S,
    ) -> None:
        """``expected`` are the hits of each request in blocks; None if other callers make them undefined."""
        self.tally = ReplayCounts()
        self._cache = cache
        self._content = content
        self._expected = expected
        self._pause_s = pause_s

    def run(self, requests: Iterable[TraceRequest], done: Callable[[], bool]) -> None:
        """Serves all requests; ``done`` is called after each and says whether to go on."""
        for request in requests:
            self.serve(request)
            if not done():
                return

    def serve(self, request: TraceRequest) -> None:
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

    def find(self, request: TraceRequest) -> None:
        """Counts the request if a full block of it is not in the store; called after all requests were put."""
        matched = self._cache.match(self._content.tokens(request), counts=False)
        if matched != request.full_blocks * BLOCK_TOKENS:
            self.tally.not_found += 1
            self.tally.note(
                f"request {request.number}: {matched} tokens in the store after the replay, "
                f"expected {request.full_blocks * BLOCK_TOKENS}"
            )

    def _check_hits(self, request: TraceRequest, matched: int) -> None:
        if self._expected is None:
            return
        expected = self._expected[request.number] * BLOCK_TOKENS
        if matched != expected:
            self.tally.hit_differences += 1
            self.tally.note(f"request {request.number}: {matched} tokens matched, expected {expected}")

    def _read(self, request: TraceRequest, tokens: TokenArray, seeds: Words, matched: int) -> int:
        """Reads and compares the matched tokens; returns their number."""
        if not matched:
            return 0
        tally, content = self.tally, self._content
        memory = content.blocks(matched // BLOCK_TOKENS)
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

    def _write(self, request: TraceRequest, tokens: TokenArray, seeds: Words, prefix: int) -> None:
        tally, content = self.tally, self._content
        missing = seeds[prefix // BLOCK_TOKENS :]
        memory = content.blocks(len(missing))
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
            time.sleep(self._pause_s)
        return call()


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    start_s = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start_s


# The callers of a replay, as threads.


THREADS_MAX = 256

OpenStore = Callable[[], Store]
Progress = Callable[[int], object]
"""Called with the number of requests served since the last call."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The namespace and the callers of a replay. Raises InvalidRequest for values out of range."""

    namespace: str
    bytes_per_token: int = 64
    threads: int = 1

    def __post_init__(self) -> None:
        replay_layout(self.bytes_per_token)
        if not 1 <= self.threads <= THREADS_MAX:
            raise InvalidRequest(f"threads={self.threads}: expected 1 to {THREADS_MAX}")


def run_threads(
    lane: Callable[[], Lane], requests: Sequence[TraceRequest], threads: int, progress: Progress
) -> ReplayCounts:
    """Serves ``requests`` by this many callers, each taking every n-th. Raises the first error of any of them."""
    lanes = [lane() for _ in range(threads)]
    lock, stop = threading.Lock(), threading.Event()

    def done() -> bool:
        with lock:
            progress(1)
        return not stop.is_set()

    with ThreadPoolExecutor(threads, "replay") as pool:
        jobs = [pool.submit(each.run, requests[number::threads], done) for number, each in enumerate(lanes)]
        try:
            for job in as_completed(jobs):
                job.result()
        finally:
            stop.set()
    total = ReplayCounts()
    for each in lanes:
        total.add(each.tally)
    return total


# The result of a replay: the figures, and whether the store passed.


MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The outcome of a replay by ``threads`` callers; with one, hits are compared request by request."""

    tally: ReplayCounts
    threads: int
    chunks_unique: int
    tokens_expected: int | None
    """Number of tokens that must match; None if several callers make it undefined."""
    seconds: float

    @property
    def failures(self) -> list[str]:
        """Returns a line for each kind of failure; empty if the store passed."""
        tally = self.tally
        found = [
            (tally.wrong_bytes, f"{tally.wrong_bytes} wrong bytes in {tally.wrong_requests} requests"),
            (tally.hit_differences, f"{tally.hit_differences} requests did not match what the trace contains"),
            (tally.short_gets, f"{tally.short_gets} gets read another number of tokens than matched before"),
            (tally.short_puts, f"{tally.short_puts} puts left tokens out"),
            (tally.not_found, f"{tally.not_found} requests were not all in the store afterwards"),
            (
                tally.chunks_written != self.chunks_unique,
                f"{tally.chunks_written} chunks written, expected {self.chunks_unique}: each chain once",
            ),
        ]
        return [text for wrong, text in found if wrong]

    @property
    def ok(self) -> bool:
        """True if every byte was right and every hit as expected."""
        return not self.failures

    @property
    def hit_ratio(self) -> float:
        """Share of the tokens in full blocks that matched."""
        return self.tally.tokens_matched / self.tally.tokens if self.tally.tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain JSON values, with stable keys."""
        return {
            "ok": self.ok,
            **{key: value for key, value in asdict(self.tally).items() if key != "differences"},
            "tokens_expected": self.tokens_expected,
            "chunks_unique": self.chunks_unique,
            "hit_ratio": self.hit_ratio,
            # MiB per second spent in the call, over all callers.
            "put_mib_per_s": _rate(self.tally.bytes_put, self.tally.put_s / self.threads),
            "get_mib_per_s": _rate(self.tally.bytes_got, self.tally.get_s / self.threads),
            "threads": self.threads,
            "seconds": self.seconds,
            "failures": self.failures,
            "differences": list(self.tally.differences),
        }


def _rate(size_bytes: int, seconds: float) -> float:
    return size_bytes / MIB / seconds if seconds > 0 else 0.0


# A whole replay: its callers, as threads of this process, and the verdict.
#
# With one caller requests keep the order of the trace, and every hit is compared. With several the order is
# undefined: bytes are still compared, each chunk must be written exactly once, and at the end every prompt must be
# stored.


def replay(
    requests: Sequence[TraceRequest], open_store: OpenStore, plan: ReplayPlan, progress: Progress = lambda count: None
) -> ReplayReport:
    """Replays ``requests``; the namespace must hold none of them, so that expected hits are exact.

    Raises InvalidRequest if it holds some, and the store's error if the store could not go on.
    """
    expected = expect(requests)
    content = Content(replay_layout(plan.bytes_per_token))
    with open_store() as store:
        cache = store.namespace(plan.namespace, content.layout)
        for request in {each.hash_ids[0]: each for each in requests if each.full_blocks}.values():
            if cache.match(content.tokens(request)[:BLOCK_TOKENS], counts=False):
                raise InvalidRequest(
                    f"namespace {plan.namespace!r} holds chunks of this trace already, so old and new hits are "
                    f"indistinguishable: choose another --namespace, or kvstore clear this one"
                )
        start_s = time.perf_counter()
        hits = expected.hits if plan.threads == 1 else None
        tally = run_threads(lambda: Lane(cache, content, hits), requests, plan.threads, progress)
        seconds = time.perf_counter() - start_s
        if plan.threads > 1:
            finder = Lane(cache, content, None)
            for request in requests:
                finder.find(request)
            tally.add(finder.tally)
    tokens_expected = expected.blocks * BLOCK_TOKENS if plan.threads == 1 else None
    return ReplayReport(tally, plan.threads, expected.chunks_unique, tokens_expected, seconds)
