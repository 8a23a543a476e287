"""Segments of one model in a store: put alone, found anywhere in a prompt, read with their keys rotated to their place.

``kvstore/segments/SEGMENTS.md`` has the rules.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.client.arrays import KvArray
from kvstore.results import PutResult
from kvstore.segments import Match, Verdict
from kvstore.tokens import Tokens
from kvstore.writes import WriteMode


class Segments:
    """The segments of one model. Thread-safe. Made by ``Cache.segments``.

    ``layout`` has the chunk length of segments (64 tokens by default). ``namespace`` is theirs: no exact chain shares
    an address with it. ``fingerprint`` is the model's, as in its verdicts; ``rope.digest`` is the other half of that.
    """

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
        """
        raise NotImplementedError

    def find(self, tokens: Tokens, starts: Sequence[int] | None = None, after: int = 0) -> list[Match]:
        """Returns the ranges of a prompt that are stored segments: ordered, disjoint, none before ``after``.

        ``after`` is the length of the exact prefix. ``starts`` are the places where segments begin, each up to the next
        one or the end; without them segments are looked for at any offset. A store that does not answer has none.
        """
        raise NotImplementedError

    def missing(
        self, tokens: Tokens, matches: Sequence[Match], starts: Sequence[int] | None = None, after: int = 0
    ) -> list[range]:
        """Returns the ranges to compute alone behind BOS, and to put, so that the next ``find`` finds them.

        With ``starts``: the segments that were not found whole. Without: the gaps between matches, cut into pieces of
        one chunk. Nothing shorter than a chunk, and nothing before ``after``.
        """
        raise NotImplementedError

    def hold(self, matches: Sequence[Match], ttl: float | None = None) -> Held:
        """Protects found segments from garbage collection until released. Use it as a context. Raises Overloaded."""
        raise NotImplementedError

    def record(self, verdict: Verdict) -> None:
        """Stores a verdict for all who use this store. Raises InvalidRequest for one of another model."""
        raise NotImplementedError

    def verdict(self) -> Verdict | None:
        """Returns the newest verdict that was recorded for this model; None (the gate is closed) if it is lost."""
        raise NotImplementedError


class Held:
    """Found segments, protected until released. Use it as a context, in one thread."""

    matches: list[Match]
    """The ranges that are held: those asked for, shorter where a chunk was lost since."""

    def read_into(self, out: KvArray, verdict: Verdict, first: int = 0) -> list[Match]:
        """Reads the held segments into their places: row ``i`` of ``out`` is position ``first + i`` of the prompt.

        ``out`` has shape ``(layers, 2, m, kv_heads, head_dim)``. K is rotated to its position, V is as it was stored.
        Returns the ranges that are verified and in place, shorter than held where a chunk was lost or damaged. All
        other rows within held ranges are undefined, and rows outside of them are not touched.

        Raises InvalidRequest if ``verdict`` does not open the gate: none, of other weights or RoPE settings, or one
        whose measurement does not hold its bounds.
        """
        raise NotImplementedError

    def release(self) -> None:
        """Ends the protection; idempotent."""
        raise NotImplementedError
