"""Segments of one model in a store: put alone, found anywhere in a prompt, read with their keys rotated to their place.

All of it is done with the caches of two namespaces, one of segments and one of verdicts. ``SEGMENTS.md`` has the rules.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore.core import tracing
from kvstore.core.address import TokenArray, Tokens
from kvstore.core.buffers import token_array
from kvstore.core.clock import Clock, SystemClock
from kvstore.core.namespace import Namespace
from kvstore.core.recency import Preset
from kvstore.core.results import PutResult
from kvstore.core.validate import is_whole, kind_of
from kvstore.core.write_mode import WriteMode, WriteModeName
from kvstore.errors import HoldBroken, InvalidRequest, KVStoreError
from kvstore.segments import gate
from kvstore.segments import search as finding
from kvstore.segments.gate import Verdict
from kvstore.segments.rope import Rope, check_keys, rotate, rotate_planes
from kvstore.segments.search import Index, Match, Range, Search, windows

if TYPE_CHECKING:
    from kvstore.client.cache import BlockCache, Cache, Hold

KvArray = npt.NDArray[Any]

CHUNK_TOKENS = 64
READERS = 4
"""Segments that are read concurrently."""
VERDICTS_MAX = 64
CLOSINGS = 2
"""A verdict that closes the gate is stored so often: one damaged file must not open it again. Those that open it leave
room for one that closes it.
"""


class Segments:
    """The segments of one model. Thread-safe. Made by ``Cache.segments``.

    ``layout`` has the chunk length of segments. ``namespace`` is theirs: no exact chain shares an address with it.
    ``fingerprint`` and ``rope.digest`` are the model's, as in its verdicts.
    """

    def __init__(
        self,
        base: Namespace,
        rope: Rope,
        chunk_tokens: int,
        opened: Callable[[Namespace], Cache],
        shared: dict[Hashable, Any],
    ) -> None:
        """``opened`` opens a namespace of the store, ``shared`` is what its caches share."""
        if not isinstance(rope, Rope):
            raise InvalidRequest(f"rope is {kind_of(rope)}: expected kvstore.segments.Rope")
        check_keys(rope, base.layout.numpy_dtype, base.layout.head_dim)
        self._opened = opened
        self.rope = rope
        self.fingerprint = base.fingerprint
        self.namespace = gate.segments_of(base, rope.digest, chunk_tokens)
        self.layout = self.namespace.layout
        self._cache = opened(self.namespace)
        self._log: Log = shared.setdefault(("segments", self.namespace.digest), Log())

    def __repr__(self) -> str:
        return f"<kvstore.Segments of {self._cache!r}>"

    def put(
        self,
        tokens: Tokens,
        kv: KvArray,
        *,
        priority: int | None = None,
        ttl: float | None = None,
        preset: Preset | None = None,
        write: WriteMode | WriteModeName | None = None,
        cache: bool = True,
        required: bool = False,
    ) -> PutResult:
        """Stores a segment: ``tokens`` without BOS, and their KV, computed alone behind BOS, keys not rotated.

        ``kv`` has shape ``(layers, 2, len(tokens), kv_heads, head_dim)`` and the layout's dtype: row 0 is that of
        ``tokens[0]``, the row of BOS is left out. K is as after its projection, bias and norm, before RoPE. Only full
        chunks are stored. Retention, ``write``, ``cache``, ``required`` and the errors are those of ``Cache.put``.

        KV of another context (cut out of a longer prompt, or blended) must not be stored here: it cannot be recognized.
        """
        ids, size = token_array(tokens), self.layout.chunk_tokens
        result = self._cache.put(
            ids, kv, priority=priority, ttl=ttl, preset=preset, write=write, cache=cache, required=required
        )
        if result.tokens_present:
            self._log.add(self._cache.blocks, ids[:size], result.tokens_present // size)
        return result

    def find(self, tokens: Tokens, starts: Sequence[int] | None = None, after: int = 0) -> list[Match]:
        """Returns the ranges of a prompt that are stored segments: ordered, disjoint, none before ``after``.

        ``after`` is the length of the exact prefix. ``starts`` are the places where segments begin, each up to the next
        one or the end. Without them segments are looked for at any offset: what this process put or found is found at
        once, what others put a second later (SEGMENTS.md, S10). A store that does not answer has none. Raises
        InvalidRequest.
        """
        search = Search.of(tokens, starts, after)

        def ask(ranges: Sequence[Range]) -> list[int]:
            counts = self._cache.match_each(search.tokens[start:end] for start, end in ranges)
            return [count // self.layout.chunk_tokens for count in counts]

        with tracing.span("kvstore.find_segments", tokens=len(search.tokens)):
            if search.starts is None:
                self._log.follow(self._cache.blocks)
            return finding.find(search, self.layout.chunk_tokens, self._log.index, ask)

    def hold(self, matches: Sequence[Match], ttl: float | None = None) -> Held:
        """Protects found segments from garbage collection until released; use it as a context.

        It looks for them once more, and holds what is still there. Raises Overloaded.
        """
        held = Held(self)
        try:
            for match in _checked(matches, self.layout.chunk_tokens):
                held._add(match, self._cache.hold(match.tokens, ttl, counts=False))
        except BaseException:
            held.release()
            raise
        return held

    def record(self, verdict: Verdict) -> None:
        """Stores a verdict for all who use this store; it takes the place of earlier ones.

        One that does not hold its bounds closes the gate that an earlier one opened. Raises InvalidRequest for one of
        another model, or if 64 were recorded (clear the namespace of verdicts); Unavailable and the like if it could
        not be stored: the gate is as it was.
        """
        gate.check_model(verdict, self.fingerprint, self.rope.digest)
        text, blocks = verdict.to_json(), self._verdicts()
        if len(text) > gate.VERDICT_BYTES:
            raise InvalidRequest(f"the verdict has {len(text)} bytes, over the limit of {gate.VERDICT_BYTES}")
        if verdict.holds:
            self._append(blocks, text, VERDICTS_MAX - CLOSINGS)
            return
        newest = self._parsed(self._read(blocks, self._newest(blocks)))
        if newest is not None and not newest.holds:
            return  # it is closed
        for _ in range(CLOSINGS):
            self._append(blocks, text, VERDICTS_MAX)

    def verdict(self) -> Verdict | None:
        """Returns the newest verdict that was recorded for this model; None (the gate is closed) if it does not hold
        its bounds, is lost, or cannot be read.
        """
        blocks = self._verdicts()
        found = self._parsed(self._read(blocks, self._newest(blocks)))
        return found if found is not None and found.holds else None

    def _append(self, blocks: BlockCache, text: bytes, numbers_max: int) -> None:
        """Stores a verdict under the first number that is free behind the newest."""
        image = text.ljust(gate.VERDICT_BYTES)
        for number in range(self._newest(blocks) + 1, numbers_max):
            # Of a prompt's blocks the last goes first. So that the newest goes last, it is the first.
            done = blocks.put(
                [_key(number)], [image], first=VERDICTS_MAX - number, priority=100, write="through", required=True
            )
            if done[0] and self._read(blocks, number) == text:
                return  # else another process recorded one at the same moment
        raise InvalidRequest(
            f"{VERDICTS_MAX} verdicts are recorded for this model, and this one is not: clear the namespace {blocks!r}"
        )

    def _parsed(self, text: bytes) -> Verdict | None:
        """Returns a verdict for this model, whether it holds or not; None for anything else."""
        try:
            return gate.check_model(Verdict.from_json(text), self.fingerprint, self.rope.digest) if text else None
        except InvalidRequest:
            return None  # of another version, or damaged before it was stored

    def _verdicts(self) -> BlockCache:
        return self._opened(gate.verdicts_of(self.namespace)).blocks

    def _newest(self, blocks: BlockCache) -> int:
        present = blocks.present([_key(number) for number in range(VERDICTS_MAX)])
        return max((number for number, there in enumerate(present) if there), default=-1)

    def _read(self, blocks: BlockCache, number: int) -> bytes:
        image = bytearray(gate.VERDICT_BYTES)
        return bytes(image).rstrip() if number >= 0 and blocks.get([_key(number)], [image])[0] else b""


class Held:
    """Found segments, protected until released: a hold on each. Use it as a context, in one thread."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._holds: list[Hold] = []
        self._is_released = False
        self.matches: list[Match] = []
        """The ranges that are held."""

    def _add(self, match: Match, hold: Hold) -> None:
        """Adds what ``hold`` found of a segment."""
        if hold.tokens:
            self._holds.append(hold)
            self.matches.append(match.leading(hold.tokens))
        else:
            hold.release()

    def read_into(self, out: KvArray, verdict: Verdict, first: int = 0) -> list[Match]:
        """Reads the held segments into their places: row ``i`` of ``out`` is position ``first + i`` of the prompt.

        ``out`` has shape ``(layers, 2, m, kv_heads, head_dim)``. K is rotated to its position, V is as it was stored.
        Returns the ranges that are verified and in place, shorter than held where a chunk was lost or damaged. Other
        rows within held ranges are undefined, and rows outside of them are not touched.

        Raises InvalidRequest if ``verdict`` does not open the gate: none, of other weights or RoPE settings, or one
        whose measurement does not hold its bounds; HoldBroken once a hold has ended.
        """
        if self._is_released:
            raise HoldBroken("the hold has ended (it was released): find again")
        segments = self._segments
        gate.check(verdict, segments.fingerprint, segments.rope.digest)
        if not isinstance(out, np.ndarray) or out.ndim != 5:
            raise InvalidRequest(
                f"out is {kind_of(out)}: expected an array of shape (layers, 2, tokens, kv_heads, head_dim)"
            )
        ends = max((match.end for match in self.matches), default=first)
        if not is_whole(first) or any(match.start < first for match in self.matches):
            raise InvalidRequest(f"first={first!r}: expected at most the start of the first held range")
        if out.shape[2] < ends - first:
            raise InvalidRequest(f"out has room for {out.shape[2]} tokens: expected at least {ends - first}, as held")
        places = [out[:, :, match.start - first : match.end - first] for match in self.matches]
        with (
            tracing.span("kvstore.get_segments", tokens=sum(map(len, self.matches))),
            ThreadPoolExecutor(READERS, "kvstore-segments") as readers,  # which waits for those that write into ``out``
        ):
            contexts = [copy_context() for _ in places]
            counts = readers.map(
                lambda context, *what: context.run(self._read, *what), contexts, self._holds, self.matches, places
            )
            return [match.leading(count) for match, count in zip(self.matches, counts, strict=True) if count]

    def _read(self, hold: Hold, match: Match, place: KvArray) -> int:
        """Reads one segment into its place, and rotates its keys."""
        rope, count = self._segments.rope, hold.read_into(place)
        keys = place[:, 0, :count].view(self._segments.layout.numpy_dtype)
        if keys[0].flags.c_contiguous:
            rotate_planes(rope, keys, match.start)
        else:
            keys[:] = rotate(rope, keys, match.start)
        return count

    def release(self) -> None:
        """Ends the protection; idempotent. Does nothing in a forked child: the holds are its parent's."""
        self._is_released = True
        for hold in self._holds:
            hold.release()

    def __repr__(self) -> str:
        return f"<kvstore.Held {sum(map(len, self.matches))} tokens, {self._segments!r}>"

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _key(number: int) -> bytes:
    return blake2b(b"%d" % number, digest_size=16, person=b"kvstore.verdict").digest()


def _checked(matches: Sequence[Match], chunk_tokens: int) -> Sequence[Match]:
    """Raises InvalidRequest if these are not what ``find`` returns."""
    end = 0
    if not isinstance(matches, Sequence):
        raise InvalidRequest(f"matches are {kind_of(matches)}: expected what find returned")
    for match in matches:
        if not isinstance(match, Match):
            raise InvalidRequest(f"matches have a {type(match).__name__}: expected what find returned")
        if match.start < end or not len(match) or len(match) % chunk_tokens or len(match.tokens) != len(match):
            raise InvalidRequest(
                f"{match!r} is not in order, or no whole number of chunks: expected what find returned"
            )
        end = match.end
    return matches


# The log of segments: which texts begin one, so that all processes of a store find them at any offset (SEGMENTS.md,
# S10).
#
# A log is a row of blocks for each hour, in the namespace of the segments, under consecutive numbers: the first writer
# of a number wins. With one row for all time, its end could not be found once its beginning was evicted. A block
# repeats the newest records that its writer knew. So a reader that is behind reads only some of them, and later ones
# make up for one that is lost.


RECORD = np.dtype([("window", "<u8"), ("chunks", "<u4")])
"""The hash of a segment's first chunk, and the number of its chunks; zeros fill a block."""
RECORDS = 256
"""Records of a block."""
NEW_MAX = 4
"""Those of them that the block before it has not."""
STRIDE = RECORDS // NEW_MAX
HOURS = 168
"""A process begins with the logs of so many hours, a week."""
HOUR_S = 3600.0
LATE_S = 60.0
"""The log of an hour may grow for so long after its end: clocks differ."""
LOOK_S = 1.0
"""Shortest time between two looks at the log."""
PROBES, PROBES_MAX = 4, 20
"""Numbers read in one batch to find the newest block: 0, 1, 3, 7, ... after the last known one."""
READS_MAX = 256
"""Limit on the blocks of one hour that a process reads in one batch: those of the last 65,536 records."""
TRIES_MAX = 8
"""A record is left out if other processes win so many numbers before it."""

Records = npt.NDArray[Any]


class Log:
    """The index of one namespace of segments, and this process's place in its log. Thread-safe.

    It is a hint: what cannot be read or written is left out, and nothing raises for it.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.index = Index()
        self._clock = clock or SystemClock()
        self._new: deque[tuple[int, int]] = deque()
        self._turn = threading.Semaphore()  # guards what follows, and is held during calls to the store
        self._ends: dict[int, int] = {}
        """By hour, the number behind the newest block."""
        self._newest: dict[int, Records] = {}
        """By hour, the records of that block."""
        self._first_hour = 0
        """The logs of the hours before it have ended, and were read."""
        self._looked_s = float("-inf")

    def add(self, blocks: BlockCache, tokens: TokenArray, chunks: int) -> None:
        """Records a stored segment by its first chunk's tokens: here immediately, for other processes in the log."""
        window = windows(tokens, len(tokens))
        if self.index.lengths(window)[0] >= chunks:
            return
        self.index.add(window, np.array([chunks]))
        self._new.append((int(window[0]), chunks))
        with self._turn, suppress(KVStoreError):
            # Also what other threads add; they find nothing left then.
            while new := [self._new.popleft() for _ in range(min(NEW_MAX, len(self._new)))]:
                self._append(blocks, np.array(new, RECORD))

    def follow(self, blocks: BlockCache) -> None:
        """Takes into the index what others have put, at most once in ``LOOK_S``."""
        if not self._turn.acquire(blocking=False):
            return  # another thread does
        try:
            looked_s, now_s = self._clock.monotonic_s(), self._clock.now_s()
            if looked_s - self._looked_s < LOOK_S:
                return
            self._looked_s, last = looked_s, int(now_s // HOUR_S)
            hours = range(max(last - HOURS, self._first_hour), last + 1)
            with suppress(KVStoreError):
                places = [(hour, number) for hour in hours if hour not in self._ends for number in _numbers(0, PROBES)]
                for hour in sorted({hour for hour, _ in self._blocks(blocks, places)} | self._ends.keys() & {*hours}):
                    self._read(blocks, hour)
                self._first_hour = int((now_s - LATE_S) // HOUR_S)
        finally:
            self._turn.release()

    def _append(self, blocks: BlockCache, new: Records) -> None:
        hour = int(self._clock.now_s() // HOUR_S)
        for _ in range(TRIES_MAX):
            place = hour, self._ends.get(hour, 0)
            records = np.concatenate([self._newest.get(hour, new[:0]), new])[-RECORDS:]
            image = records.tobytes().ljust(RECORDS * RECORD.itemsize, b"\0")
            won = self._blocks(blocks, [place]).get(place) if blocks.put([_log_key(*place)], [image])[0] else None
            if won is None:
                return
            if won.tobytes() == records.tobytes():
                self._ends[hour], self._newest[hour] = place[1] + 1, records
                return
            self._read(blocks, hour)

    def _read(self, blocks: BlockCache, hour: int) -> None:
        """Reads what an hour's log has behind the last block that is known."""
        start = end = self._ends.get(hour, 0)
        probes = PROBES
        while found := self._blocks(blocks, [(hour, number) for number in _numbers(end, probes)]):
            newest = max(found)
            end, self._newest[hour] = newest[1] + 1, found[newest]
            probes = min(2 * probes, PROBES_MAX) if len(found) == probes else probes
        self._ends[hour] = end
        # The newest was read. Each of the others has what is new in the STRIDE blocks that end with it.
        others = range(end - 1 - STRIDE, start - 1, -STRIDE)[:READS_MAX]
        self._blocks(blocks, [(hour, number) for number in others])

    def _blocks(self, blocks: BlockCache, places: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Records]:
        """Reads blocks, each by hour and number, into the index; returns the records of those that are there."""
        found = dict[tuple[int, int], Records]()
        images = [np.zeros(RECORDS, RECORD) for _ in places]
        hits = blocks.get([_log_key(*place) for place in places], images) if places else []
        for place, records, hit in zip(places, images, hits, strict=True):
            if hit:
                found[place] = records = records[records["chunks"] > 0]
                self.index.add(records["window"], records["chunks"])
        return found


def _numbers(first: int, count: int) -> list[int]:
    """Numbers to look for the end of a log at: ever farther apart."""
    return [first + (1 << power) - 1 for power in range(count)]


def _log_key(hour: int, number: int) -> bytes:
    return blake2b(b"%d %d" % (hour, number), digest_size=16, person=b"kvstore.segments").digest()
