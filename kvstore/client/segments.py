"""Segments of one model in a store: put alone, found anywhere in a prompt, read with their keys rotated to their place.

``kvstore/segments/SEGMENTS.md`` has the rules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from hashlib import blake2b

import numpy as np

from kvstore import tracing
from kvstore.brief import kind_of
from kvstore.buffers import KvArray, Sections, fillable, planes_of, source_array, target_array
from kvstore.checks import checked_hold_ttl, is_whole
from kvstore.client.blocks import BlockCache
from kvstore.client.dropping import release_dropped
from kvstore.client.owner import Owner
from kvstore.client.port import Port, PortGuard
from kvstore.client.refusals import put_prompt
from kvstore.errors import HoldBroken, InvalidRequest
from kvstore.hints import Hints, Preset
from kvstore.namespace import Namespace
from kvstore.results import PutResult
from kvstore.segments import Match, Rope, Verdict, finding, gate, naming
from kvstore.segments.rotation import check_keys, rotate_planes
from kvstore.segments.search import Search
from kvstore.tokens import Tokens, token_array
from kvstore.writes import WriteMode, WriteModeName

CHUNK_TOKENS = 64
READERS = 4
"""Segments that are read at once."""
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

    def __init__(self, port: Port, base: Namespace, rope: Rope, chunk_tokens: int, write: WriteMode | None) -> None:
        if not isinstance(rope, Rope):
            raise InvalidRequest(f"rope is {kind_of(rope)}: expected kvstore.segments.Rope")
        check_keys(rope, base.layout.numpy_dtype, base.layout.head_dim)
        self._port = port
        self._write = write
        self.rope = rope
        self.fingerprint = base.fingerprint
        self.namespace = naming.segments_of(base, rope.digest, chunk_tokens)
        self.layout = self.namespace.layout
        port.open_namespace(self.namespace)

    def __repr__(self) -> str:
        return f"<kvstore.Segments {self.namespace.short}, {self._port.place}>"

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

        KV of another context (cut out of a longer prompt, or blended) must not come here: it cannot be told apart.
        """
        hints = Hints.of(priority, ttl, preset)
        ids = token_array(tokens)
        planes = planes_of(source_array(kv, self.layout, len(ids)), self.layout)
        mode = WriteMode.of_put(write, self._write, cache=cache)
        with tracing.span("kvstore.put_segment", tokens=len(ids)):
            return put_prompt(self._port, self.namespace, ids, 0, planes, hints, mode, required=required)

    def find(self, tokens: Tokens, starts: Sequence[int] | None = None, after: int = 0) -> list[Match]:
        """Returns the ranges of a prompt that are stored segments: ordered, disjoint, none before ``after``.

        ``after`` is the length of the exact prefix. ``starts`` are the places where segments begin, each up to the next
        one or the end; without them segments are looked for at any offset, as far as the node behind this store knows
        them: what it put or found at once, what others put some seconds later (SEGMENTS.md, S10). A store that does not
        answer has none. Raises InvalidRequest.
        """
        search = Search.of(tokens, starts, after)
        with tracing.span("kvstore.find_segments", tokens=len(search.tokens)):
            return self._port.segments.find(self.namespace, search)

    def find_held(
        self, tokens: Tokens, starts: Sequence[int] | None = None, after: int = 0, ttl: float | None = None
    ) -> Held:
        """Finds segments as ``find`` does, and holds them as ``hold`` does, in one call; ``matches`` has what it found.

        Raises InvalidRequest, Overloaded.
        """
        ttl_s = None if ttl is None else checked_hold_ttl(ttl)
        search = Search.of(tokens, starts, after)
        with tracing.span("kvstore.find_segments", tokens=len(search.tokens)):
            matches, guard = self._port.segments.hold(self.namespace, search, ttl_s)
        return Held(self, guard, matches)

    def missing(
        self, tokens: Tokens, matches: Sequence[Match], starts: Sequence[int] | None = None, after: int = 0
    ) -> list[range]:
        """Returns the ranges to compute alone behind BOS, and to put, so that the next ``find`` finds them.

        With ``starts``: the segments that were not found whole. Without: the gaps between matches, cut into pieces of
        one chunk. Nothing shorter than a chunk, and nothing before ``after``. Raises InvalidRequest.
        """
        return finding.missing(Search.of(tokens, starts, after), _checked_kind(matches), self.layout.chunk_tokens)

    def hold(self, matches: Sequence[Match], ttl: float | None = None) -> Held:
        """Protects found segments from garbage collection until released; use it as a context.

        It looks for them once more, and holds what is still there. Raises Overloaded.
        """
        ttl_s = None if ttl is None else checked_hold_ttl(ttl)
        checked = _checked(matches, self.layout.chunk_tokens)
        if not checked:
            return Held(self, None, checked)
        starts = np.cumsum([0, *map(len, checked[:-1])]).tolist()
        again = Search.of(np.concatenate([match.tokens for match in checked]), starts)
        found, guard = self._port.segments.hold(self.namespace, again, ttl_s)
        there = {match.start: len(match) for match in found}
        return Held(
            self, guard, [one.leading(there[at]) for at, one in zip(starts, checked, strict=True) if at in there]
        )

    def record(self, verdict: Verdict) -> None:
        """Stores a verdict for all who use this store; it takes the place of earlier ones.

        One that does not hold its bounds closes the gate that an earlier one opened. Raises InvalidRequest for one of
        another model, or if 64 were recorded (clear the namespace of verdicts); Unavailable and the like if it could
        not be stored: the gate is as it was.
        """
        gate.check_model(verdict, self.fingerprint, self.rope.digest)
        text, cache = verdict.to_json(), self._verdicts()
        if len(text) > gate.VERDICT_BYTES:
            raise InvalidRequest(f"the verdict has {len(text)} bytes, over the limit of {gate.VERDICT_BYTES}")
        if verdict.holds:
            self._append(cache, text, VERDICTS_MAX - CLOSINGS)
            return
        newest = self._parsed(self._read(cache, self._newest(cache)))
        if newest is not None and not newest.holds:
            return  # it is closed
        for _ in range(CLOSINGS):
            self._append(cache, text, VERDICTS_MAX)

    def verdict(self) -> Verdict | None:
        """Returns the newest verdict that was recorded for this model; None (the gate is closed) if it does not hold
        its bounds, is lost, or cannot be read.
        """
        cache = self._verdicts()
        found = self._parsed(self._read(cache, self._newest(cache)))
        return found if found is not None and found.holds else None

    def _append(self, cache: BlockCache, text: bytes, numbers_max: int) -> None:
        """Stores a verdict under the first number that is free behind the newest."""
        image = text.ljust(gate.VERDICT_BYTES)
        for number in range(self._newest(cache) + 1, numbers_max):
            # Of a prompt's blocks the last goes first. So that the newest goes last, it is the first.
            done = cache.put([_key(number)], [image], first=VERDICTS_MAX - number, priority=100, required=True)
            if done[0] and self._read(cache, number) == text:
                return  # else somebody else recorded one at the same moment
        raise InvalidRequest(
            f"{VERDICTS_MAX} verdicts are recorded for this model, and this one is not: clear the namespace {cache!r}"
        )

    def _parsed(self, text: bytes) -> Verdict | None:
        """Returns a verdict for this model, whether it holds or not; None for anything else."""
        try:
            return gate.check_model(Verdict.from_json(text), self.fingerprint, self.rope.digest) if text else None
        except InvalidRequest:
            return None  # of another version, or damaged before it was stored

    def _verdicts(self) -> BlockCache:
        namespace = naming.verdicts_of(self.namespace)
        self._port.open_namespace(namespace)
        return BlockCache(self._port, namespace, WriteMode.THROUGH)

    def _newest(self, cache: BlockCache) -> int:
        present = cache.present([_key(number) for number in range(VERDICTS_MAX)])
        return max((number for number, there in enumerate(present) if there), default=-1)

    def _read(self, cache: BlockCache, number: int) -> bytes:
        image = bytearray(gate.VERDICT_BYTES)
        return bytes(image).rstrip() if number >= 0 and cache.get([_key(number)], [image])[0] else b""


class Held:
    """Found segments, protected until released. Use it as a context, in one thread."""

    def __init__(self, segments: Segments, guard: PortGuard | None, matches: list[Match]) -> None:
        self._owner = Owner()
        self._segments = segments  # keeps the store open: an unreferenced store closes, which ends its holds
        self._guard = guard
        self._is_released = False
        self.matches = matches
        """The ranges that are held."""

    def read_into(self, out: KvArray, verdict: Verdict, first: int = 0) -> list[Match]:
        """Reads the held segments into their places: row ``i`` of ``out`` is position ``first + i`` of the prompt.

        ``out`` has shape ``(layers, 2, m, kv_heads, head_dim)``. K is rotated to its position, V is as it was stored.
        Returns the ranges that are verified and in place, shorter than held where a chunk was lost or damaged. Other
        rows within held ranges are undefined, and rows outside of them are not touched.

        Raises InvalidRequest if ``verdict`` does not open the gate: none, of other weights or RoPE settings, or one
        whose measurement does not hold its bounds; HoldBroken once the hold has ended.
        """
        self._owner.check()
        if self._is_released:
            raise HoldBroken("the hold has ended (it was released): find again")
        segments = self._segments
        gate.check(verdict, segments.fingerprint, segments.rope.digest)
        target = target_array(out, segments.layout)
        ends = max((match.end for match in self.matches), default=first)
        if not is_whole(first) or any(match.start < first for match in self.matches):
            raise InvalidRequest(f"first={first!r}: expected at most the start of the first held range")
        if target.shape[2] < ends - first:
            raise InvalidRequest(
                f"out has room for {target.shape[2]} tokens: expected at least {ends - first}, as held"
            )
        places = [target[:, :, match.start - first : match.end - first] for match in self.matches]
        with tracing.span("kvstore.get_segments", tokens=sum(map(len, self.matches))):
            self._check()
            read = [match for match in self._read_all(places) if len(match)]
            if sum(map(len, read)) < sum(map(len, self.matches)):
                self._check()  # perhaps that is why
        return read

    def _read_all(self, places: Sequence[KvArray]) -> list[Match]:
        """Reads all matches, some at once: one is rotated while others are read."""
        if len(places) < 2:
            return list(map(self._read_one, self.matches, places))
        threads, reads = ThreadPoolExecutor(min(READERS, len(places)), "kvstore-segments"), _Reads()
        read = partial(reads.do, self._read_one)
        try:
            begun = [
                threads.submit(copy_context().run, read, match, place)
                for match, place in zip(self.matches, places, strict=True)
            ]
            return [each.result() for each in begun]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            reads.end()

    def _read_one(self, match: Match, place: KvArray) -> Match:
        segments = self._segments
        filled = fillable(place)

        def memory(_: int) -> Sections:
            return planes_of(filled, segments.layout)

        size = segments.layout.chunk_tokens
        count = segments._port.get(segments.namespace, match.tokens, len(match) // size, memory) * size
        keys = filled[:, 0, :count].view(segments.layout.numpy_dtype)
        rotate_planes(segments.rope, keys, match.start)
        if filled is not place:
            place[:, :, :count] = filled[:, :, :count]
        return match.leading(count)

    def _check(self) -> None:
        if self._guard is not None:
            self._guard.check()

    def release(self) -> None:
        """Ends the protection; idempotent. Does nothing in a forked child: the hold is its parent's."""
        self._is_released = True
        if self._owner.is_here and self._guard is not None:
            self._guard.release()

    def __repr__(self) -> str:
        return f"<kvstore.Held {sum(map(len, self.matches))} tokens, {self._segments!r}>"

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if self._guard is not None and self._owner.is_here and not self._is_released:
            release_dropped(self, self._guard)


class _Reads:
    """Reads that other threads do, until they are ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0  # guarded by _changed, as the next one
        self._ended = False

    def do(self, read: Callable[[Match, KvArray], Match], match: Match, place: KvArray) -> Match:
        """Reads, in any thread. Raises CancelledError after ``end``."""
        with self._changed:
            if self._ended:
                raise CancelledError
            self._running += 1
        try:
            return read(match, place)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """Begins no more; returns once no thread writes into memory of the caller."""
        with self._changed:
            self._ended = True
            self._changed.wait_for(lambda: not self._running)


def _key(number: int) -> bytes:
    return blake2b(b"%d" % number, digest_size=16, person=b"kvstore.verdict").digest()


def _checked_kind(matches: Sequence[Match]) -> Sequence[Match]:
    if not isinstance(matches, Sequence):
        raise InvalidRequest(f"matches are {kind_of(matches)}: expected what find returned")
    for match in matches:
        if not isinstance(match, Match):
            raise InvalidRequest(f"matches have a {type(match).__name__}: expected what find returned")
    return matches


def _checked(matches: Sequence[Match], chunk_tokens: int) -> list[Match]:
    """Raises InvalidRequest if these are not what ``find`` returns."""
    end = 0
    for match in _checked_kind(matches):
        if match.start < end or not len(match) or len(match) % chunk_tokens or len(match.tokens) != len(match):
            raise InvalidRequest(
                f"{match!r} is not in order, or no whole number of chunks: expected what find returned"
            )
        end = match.end
    return list(matches)
