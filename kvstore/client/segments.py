"""Segments of one model in a store: put alone, found anywhere in a prompt, read with their keys rotated to their place.

``kvstore/segments/SEGMENTS.md`` has the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from kvstore import tracing
from kvstore.client.arrays import KvArray, fillable, source_array, target_array
from kvstore.client.blocks import BlockCache
from kvstore.client.local import heads_of
from kvstore.client.owner import Owner
from kvstore.client.planning import TOKENS_MAX, ask_in_calls
from kvstore.client.port import Port, PortHold
from kvstore.errors import HoldBroken, InvalidRequest
from kvstore.hints import Hints
from kvstore.namespace import Namespace
from kvstore.results import PutResult
from kvstore.sections import Sections, planes_of
from kvstore.segments import Match, Rope, Verdict, finding, gate, naming
from kvstore.segments.index import Index, windows
from kvstore.segments.rotation import check_keys, rotate_planes
from kvstore.tokens import TokenArray, Tokens, token_array
from kvstore.writes import WriteMode

CHUNK_TOKENS = 64
LISTING_S = 2.0
"""Limit on the listing before the first search at any offset."""
VERDICTS_MAX = 64


class Segments:
    """The segments of one model. Thread-safe. Made by ``Cache.segments``.

    ``layout`` has the chunk length of segments. ``namespace`` is theirs: no exact chain shares an address with it.
    ``fingerprint`` and ``rope.digest`` are the model's, as in its verdicts.
    """

    def __init__(self, port: Port, base: Namespace, rope: Rope, chunk_tokens: int, write: WriteMode | None) -> None:
        if not isinstance(rope, Rope):
            raise InvalidRequest(f"rope is a {type(rope).__name__}: expected kvstore.segments.Rope")
        check_keys(rope, base.layout.numpy_dtype, base.layout.head_dim)
        self._port = port
        self._write = write
        self._index = Index()
        self._is_listed = False
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
        preset: str | None = None,
        write: WriteMode | str | None = None,
    ) -> PutResult:
        """Stores a segment: ``tokens`` without BOS, and their KV, computed alone behind BOS, keys not rotated.

        ``kv`` has shape ``(layers, 2, len(tokens), kv_heads, head_dim)`` and the layout's dtype: row 0 is that of
        ``tokens[0]``, the row of BOS is left out. K is as after its projection, bias and norm, before RoPE. Only full
        chunks are stored. Retention and ``write`` are those of ``Cache.put``, and so are the errors.

        KV of another context (cut out of a longer prompt, or blended) must not come here: it cannot be told apart.
        """
        hints = Hints.of(priority, ttl, preset)
        ids = token_array(tokens)
        planes = planes_of(source_array(kv, self.layout, len(ids)), self.layout)
        mode = self._write if write is None else WriteMode.of(write)
        with tracing.span("kvstore.put_segment", tokens=len(ids)):
            result = self._port.put(self.namespace, ids, 0, planes, hints, mode)
        self._learn(ids, [0], [result.tokens_present])
        return result

    def find(self, tokens: Tokens, starts: Sequence[int] | None = None, after: int = 0) -> list[Match]:
        """Returns the ranges of a prompt that are stored segments: ordered, disjoint, none before ``after``.

        ``after`` is the length of the exact prefix. ``starts`` are the places where segments begin, each up to the next
        one or the end; without them segments are looked for at any offset, those that this object put or found before,
        or that could be listed (``rebuild``). A store that does not answer has none. Raises InvalidRequest.
        """
        ids, chunk_tokens = token_array(tokens), self.layout.chunk_tokens
        _check_after(after, len(ids))

        def ask(ranges: Sequence[finding.Range]) -> list[int]:
            return self._ask(ids, ranges)

        with tracing.span("kvstore.find_segments", tokens=len(ids)):
            if starts is None:
                if not self._is_listed:
                    self.rebuild(LISTING_S)
                return finding.find_anywhere(ids, after, chunk_tokens, self._index, ask)
            matches = finding.find_given(ids, finding.given(len(ids), starts, after), chunk_tokens, ask)
        self._learn(ids, [match.start for match in matches], list(map(len, matches)))
        return matches

    def missing(
        self, tokens: Tokens, matches: Sequence[Match], starts: Sequence[int] | None = None, after: int = 0
    ) -> list[range]:
        """Returns the ranges to compute alone behind BOS, and to put, so that the next ``find`` finds them.

        With ``starts``: the segments that were not found whole. Without: the gaps between matches, cut into pieces of
        one chunk. Nothing shorter than a chunk, and nothing before ``after``. Raises InvalidRequest.
        """
        total, chunk_tokens = len(token_array(tokens)), self.layout.chunk_tokens
        _check_after(after, total)
        if starts is None:
            return finding.missing_anywhere(total, matches, after, chunk_tokens)
        return finding.missing_given(finding.given(total, starts, after), matches, chunk_tokens)

    def rebuild(self, seconds_max: float = 600.0) -> int:
        """Lists the stored segments for searches at any offset; returns how many were listed.

        Only a store in this process can list (``kvstore.open``). The first such search does it within 2 s. It reads a
        page of each chunk, 262,144 of them at most.
        """
        self._is_listed = True
        heads = heads_of(self._port, self.namespace, seconds_max)
        for head in heads:
            self._learn(head.tokens, [0], [head.chunks * self.layout.chunk_tokens])
        return len(heads)

    def hold(self, matches: Sequence[Match], ttl: float | None = None) -> Held:
        """Protects found segments from garbage collection until released. Use it as a context. Raises Overloaded."""
        if ttl is not None and not (isinstance(ttl, int | float) and ttl > 0):
            raise InvalidRequest(f"ttl={ttl!r}: expected a positive number of seconds")
        checked = _checked(matches, self.layout.chunk_tokens)
        # A collector deletes nothing that is condemned after a hold began (PROTOCOL.md, H2): one protects them all.
        guard = self._port.hold(self.namespace, checked[0].tokens, ttl) if checked else None
        return Held(self, guard, checked)

    def record(self, verdict: Verdict) -> None:
        """Stores a verdict for all who use this store; it takes the place of earlier ones.

        Raises InvalidRequest for one of another model or that does not hold its bounds, or if 64 were recorded (clear
        the namespace of verdicts); Unavailable and the like if it could not be stored.
        """
        gate.check(verdict, self.fingerprint, self.rope.digest)
        text, cache = verdict.to_json(), self._verdicts()
        image = text.ljust(gate.VERDICT_BYTES)
        if len(image) != gate.VERDICT_BYTES:
            raise InvalidRequest(f"the verdict has {len(text)} bytes, over the limit of {gate.VERDICT_BYTES}")
        for number in range(self._newest(cache) + 1, VERDICTS_MAX):
            # Of a prompt's blocks the last goes first. So that the newest goes last, it is the first.
            done = cache.put([_key(number)], [image], first=VERDICTS_MAX - number, priority=100)
            if done[0] and self._read(cache, number) == text:
                return  # else somebody else recorded one at the same moment
        raise InvalidRequest(f"{VERDICTS_MAX} verdicts are recorded for this model: clear the namespace {cache!r}")

    def verdict(self) -> Verdict | None:
        """Returns the newest verdict that was recorded for this model; None (the gate is closed) if it is lost."""
        cache = self._verdicts()
        newest = self._newest(cache)
        text = self._read(cache, newest) if newest >= 0 else b""
        try:
            return gate.check(Verdict.from_json(text), self.fingerprint, self.rope.digest) if text else None
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
        return bytes(image).rstrip() if cache.get([_key(number)], [image])[0] else b""

    def _learn(self, ids: TokenArray, starts: Sequence[int], lengths: Sequence[int]) -> None:
        """Takes stored segments into the index: where they begin in a prompt, and how many tokens they have."""
        size = self.layout.chunk_tokens
        stored = [(start, length // size) for start, length in zip(starts, lengths, strict=True) if length >= size]
        if stored:
            places, chunks = np.array(stored).T
            self._index.add(windows(ids[: places[-1] + size], size)[places], chunks)

    def _ask(self, ids: TokenArray, ranges: Sequence[finding.Range]) -> list[int]:
        size = self.layout.chunk_tokens

        def match(call: list[tuple[int, int]]) -> list[int]:
            prompts = [ids[ranges[at][0] : ranges[at][0] + chunks * size] for at, chunks in call]
            return self._port.match_each(self.namespace, prompts)

        wanted = [(at, (end - start) // size) for at, (start, end) in enumerate(ranges)]
        return ask_in_calls(wanted, TOKENS_MAX // size, match)


class Held:
    """Found segments, protected until released. Use it as a context, in one thread."""

    def __init__(self, segments: Segments, guard: PortHold | None, matches: list[Match]) -> None:
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
        whose measurement does not hold its bounds; HoldBroken after the release.
        """
        self._owner.check()
        if self._is_released:
            raise HoldBroken("the hold has ended (it was released): find again")
        segments = self._segments
        gate.check(verdict, segments.fingerprint, segments.rope.digest)
        target = target_array(out, segments.layout)
        ends = max((match.end for match in self.matches), default=first)
        if not isinstance(first, int | np.integer) or any(match.start < first for match in self.matches):
            raise InvalidRequest(f"first={first!r}: expected at most the start of the first held range")
        if target.shape[2] < ends - first:
            raise InvalidRequest(
                f"out has room for {target.shape[2]} tokens: expected at least {ends - first}, as held"
            )
        with tracing.span("kvstore.get_segments", tokens=sum(map(len, self.matches))):
            read = [
                self._read_one(match, target[:, :, match.start - first : match.end - first]) for match in self.matches
            ]
        return [match for match in read if len(match)]

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


def _key(number: int) -> bytes:
    return blake2b(b"%d" % number, digest_size=16, person=b"kvstore.verdict").digest()


def _check_after(after: int, total: int) -> None:
    if not isinstance(after, int | np.integer) or not 0 <= after <= total:
        raise InvalidRequest(f"after={after!r}: expected 0 to {total}, the token count")


def _checked(matches: Sequence[Match], chunk_tokens: int) -> list[Match]:
    """Raises InvalidRequest if these are not what ``find`` returns."""
    end = 0
    for match in matches:
        if not isinstance(match, Match):
            raise InvalidRequest(f"matches have a {type(match).__name__}: expected what find returned")
        if match.start < end or not len(match) or len(match) % chunk_tokens or len(match.tokens) != len(match):
            raise InvalidRequest(
                f"{match!r} is not in order, or no whole number of chunks: expected what find returned"
            )
        end = match.end
    return list(matches)
