"""The cache of one namespace: the class that an engine calls. It checks arguments and calls a port."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from kvstore import tracing
from kvstore.brief import brief
from kvstore.buffers import KvArray, Sections, fillable, layer_arrays, new_array, planes_of, source_array, target_array
from kvstore.checks import checked_flag, checked_hold_ttl, checked_worker, is_whole
from kvstore.client.blocks import BlockCache
from kvstore.client.dropping import release_dropped
from kvstore.client.operation import Operation
from kvstore.client.owner import Owner
from kvstore.client.pin import Pin, check_pin
from kvstore.client.port import Port, PortHold
from kvstore.client.refusals import put_prompt
from kvstore.errors import InvalidRequest
from kvstore.hints import Hints, Preset, checked_unused_s
from kvstore.namespace import Namespace
from kvstore.node.prefetch import TierName, checked_tier
from kvstore.planning import Plan, Prompts, TokenStorage, make_plan
from kvstore.planning.prompts import checked_prompts
from kvstore.results import Cleared, LayerMemory, PutResult
from kvstore.segments import CHUNK_TOKENS, Rope, Segments
from kvstore.tokens import TokenArray, Tokens, token_array
from kvstore.writes import WriteMode, WriteModeName

BAND_MAX = 8
BAND_BYTES = 32 << 20
"""Limits of layers that are read together, if each has memory of its own."""
PROMPTS_MAX = 4096
TOKENS_MAX = 1 << 20
"""Limits on one of the calls of ``match_each``, 4 MiB; a longer prompt is a call of its own."""
EACH_S = 60.0
"""Limit on all calls of one ``match_each``."""


class Cache:
    """KV of one namespace, by tokens. Thread-safe. Made by ``Store.namespace``.

    ``tokens`` is any sequence of ints or an integer array, 0 <= id < 2**32, at most 4,194,304 of them. All methods
    raise InvalidRequest for wrong arguments. A miss is a value, never an exception.
    """

    def __init__(self, port: Port, namespace: Namespace, write: WriteMode | None = None) -> None:
        self._port = port
        self._write = write
        self.namespace = namespace
        self.layout = namespace.layout
        self.blocks = BlockCache(port, namespace, write)

    def __repr__(self) -> str:
        return f"<kvstore.Cache {self.namespace.short}, {self._port.place}>"

    def put(
        self,
        tokens: Tokens,
        kv: KvArray,
        prefix: int = 0,
        *,
        priority: int | None = None,
        ttl: float | None = None,
        preset: Preset | None = None,
        write: WriteMode | WriteModeName | None = None,
        cache: bool = True,
        required: bool = False,
    ) -> PutResult:
        """Stores the KV of ``tokens``; only full chunks are stored.

        ``kv`` has shape ``(layers, 2, len(tokens) - prefix, kv_heads, head_dim)``, K then V. It need not be
        C-contiguous, and no reference to it is kept. The first ``prefix`` tokens, a multiple of chunk_tokens, are in
        the store already; if one of their chunks is missing nothing is stored, and ``tokens_present`` says how far the
        store goes. First writer wins: an existing chunk is never replaced.

        Retention: ``priority`` is 0 to 100 (35 by default), and lower ones go first when room is needed. ``ttl`` is in
        seconds since the last use; after it chunks may go even if there is room (default: never). It is rounded up to 5
        min, 30 min, 2 h, 12 h, 3 days or 30 days. ``preset`` sets both: chat, analytics, rag or batch
        (``kvstore.hints.PRESETS``); explicit values win. Chunks that exist already, the prefix included, are raised to
        these values, never lowered. They protect nothing; pins do.

        On a node with memory ``write`` says when this returns: "behind" once memory has the chunks, which are written
        to the root soon after and lost if the node is killed before that; "through" once the root has them, with a copy
        in memory. The default is the namespace's, or else the node's. ``cache=False`` writes through without the copy.

        A put that the store refuses (no space, or too much at once) is an ordinary outcome: ``reason`` says why, and
        ``tokens_present`` what the store has. ``required=True`` raises Overloaded instead. Raises PermissionDenied,
        Unavailable (not in time: retry).
        """
        hints = Hints.of(priority, ttl, preset)
        ids = token_array(tokens)
        size = self.layout.chunk_tokens
        if (
            isinstance(prefix, bool)
            or not isinstance(prefix, int | np.integer)
            or not 0 <= prefix <= len(ids)
            or prefix % size
        ):
            raise InvalidRequest(
                f"prefix={brief(prefix)}: expected a multiple of chunk_tokens ({size}) from 0 to {len(ids)}, the token "
                "count"
            )
        array = source_array(kv, self.layout, len(ids) - int(prefix))
        first = int(prefix) // size
        source = planes_of(array, self.layout, first)
        mode = WriteMode.of_put(write, self._write, cache=cache)
        with tracing.span("kvstore.put", tokens=len(ids)):
            return put_prompt(self._port, self.namespace, ids, first, source, hints, mode, required=required)

    def match(self, tokens: Tokens, *, counts: bool = True) -> int:
        """Returns the number of leading tokens in the store, a multiple of chunk_tokens.

        Each look-up counts in the hit ratio: a match, a hold, and a get without a hold. ``counts=False`` leaves this
        one out, as before a get or hold of the same prompt.
        """
        counts, ids = checked_flag("counts", counts), token_array(tokens)
        with tracing.span("kvstore.match", tokens=len(ids)):
            return self._port.match(self.namespace, ids, counts=counts) * self.layout.chunk_tokens

    def match_each(self, prompts: Iterable[Tokens]) -> list[int]:
        """Returns ``match`` of each prompt, from a few calls to the store; the hit ratio leaves them out.

        Prompts that begin alike should follow one another: the store hashes only once what they share. A prompt that
        the store does not answer for, or not within a minute, counts as not stored.
        """
        left, size = map(token_array, checked_prompts(prompts)), self.layout.chunk_tokens
        counts, call, tokens, following = list[int](), list[TokenArray](), 0, next(left, None)
        ends_s = time.monotonic() + EACH_S
        with tracing.span("kvstore.match_each"):
            while time.monotonic() < ends_s:
                while following is not None and (
                    not call or (len(call) < PROMPTS_MAX and tokens + len(following) <= TOKENS_MAX)
                ):
                    call.append(following)
                    tokens, following = tokens + len(following), next(left, None)
                found = self._port.match_each(self.namespace, call) if call else []
                if not found:
                    break
                counts += [count * size for count in found]
                tokens -= sum(map(len, call[: len(found)]))
                call = call[len(found) :]
        return counts + [0] * (len(call) + (following is not None) + sum(1 for _ in left))

    @overload
    def get(self, tokens: Tokens) -> tuple[int, KvArray]: ...

    @overload
    def get(self, tokens: Tokens, out: KvArray) -> int: ...

    def get(self, tokens: Tokens, out: KvArray | None = None) -> tuple[int, KvArray] | int:
        """Reads the longest stored prefix, every byte verified.

        Without ``out`` it returns ``(n, array)``; the array has shape ``(layers, 2, n, kv_heads, head_dim)``. With
        ``out``, of shape ``(layers, 2, m, kv_heads, head_dim)``, it reads at most m tokens straight into it and returns
        n; the content behind the first n tokens is undefined. ``out`` is not touched after the return. It is filled
        fastest if it begins at a page.
        """
        ids = token_array(tokens)
        layout = self.layout
        chunks_max = len(ids) // layout.chunk_tokens
        if out is not None:
            target = target_array(out, layout)
            return self._fill(target, min(chunks_max, target.shape[2] // layout.chunk_tokens), ids)
        array = new_array(layout.shape(0), layout.numpy_dtype)

        def memory(count: int) -> Sections:
            nonlocal array
            array = new_array(layout.shape(count * layout.chunk_tokens), layout.numpy_dtype)
            return planes_of(array, layout)

        with tracing.span("kvstore.get", tokens=len(ids)):
            count = self._port.get(self.namespace, ids, chunks_max, memory) * layout.chunk_tokens
        return count, array[:, :, :count]

    def hold(self, tokens: Tokens, ttl: float | None = None, *, counts: bool = True) -> Hold:
        """Holds the longest stored prefix: protects it from garbage collection until released, at most ``ttl`` seconds.

        Use it as a context. ``counts=False`` leaves this look-up out of the hit ratio. Raises Overloaded if too many
        holds are alive.
        """
        ttl_s = None if ttl is None else checked_hold_ttl(ttl)
        counts, ids = checked_flag("counts", counts), token_array(tokens)
        with tracing.span("kvstore.hold", tokens=len(ids)):
            return Hold(self._port.hold(self.namespace, ids, ttl_s, counts=counts), self)

    def pin(self, tokens: Tokens, ttl: float = 3600.0, owner: str = "") -> Pin:
        """Pins the longest stored prefix: a leased refcount, visible to the cluster, that ends after ``ttl`` seconds.

        In a cluster, and in a folder on a disk of this host, it outlives this process; any other store that was opened
        without etcd forgets it when it is closed, and nobody else sees it.  ``pin.tokens`` says how much is pinned; 0
        where nothing is stored.
        Raises Unavailable where etcd does not answer, SessionLost where the node's session just ended.
        """
        check_pin(ttl, owner)
        ids = token_array(tokens)
        with tracing.span("kvstore.pin", tokens=len(ids)):
            return Pin(self._port.pin(self.namespace, ids, float(ttl), owner), self._port)

    def refcount(self, tokens: Tokens) -> int:
        """Returns the number of live pins that cover all full chunks of ``tokens``."""
        return self._port.refcount(self.namespace, token_array(tokens))

    def prefetch(self, tokens: Tokens, tier: TierName = "memory", worker: str | None = None) -> Operation:
        """Begins to bring the longest stored prefix into memory, or onto the local disk (``tier="disk"``).

        Returns an operation that counts tokens. It uses only free space: nothing in use is evicted for it. Of several
        workers, ``worker`` is the address of the one that does it; by default the one that would serve the prompt.
        Raises InvalidRequest if the node has no such tier, Overloaded if too many operations are unfinished,
        Unavailable.
        """
        ids, tier = token_array(tokens), checked_tier(tier)
        return self._port.prefetch(self.namespace, ids, tier, checked_worker(worker))

    def evict_first(self, tokens: Tokens) -> None:
        """Hints that a prompt is not needed soon: its chunks go first when memory or the local disk needs space.

        Nothing is lost, and the next use of a chunk ends it. On the root the chunks keep their rank (``supersede``).
        Raises Unavailable if no worker answers.
        """
        self._port.evict_first(self.namespace, token_array(tokens))

    def supersede(self, tokens: Tokens, kept: int, *, unused: float = 0.0) -> None:
        """Says that ``tokens`` is an abandoned branch behind its first ``kept`` tokens: that part goes first.

        Give all of the branch. Chunks that hold one of the ``kept`` tokens stay as they are. ``unused`` is how many
        seconds ago you used the branch last: a chunk that anybody used later stays as it is, and so do those before it.
        The next use of a chunk ends it. Deletes and protects nothing, and leaves hints as they are. Returns before it
        is done. Raises Unavailable if no worker answers.
        """
        ids, unused_s = token_array(tokens), checked_unused_s(unused)
        if not is_whole(kept) or not 0 <= kept <= len(ids):
            raise InvalidRequest(
                f"kept={brief(kept)}: expected 0 to {len(ids)} tokens, those that other prompts go on from"
            )
        first = -(-int(kept) // self.layout.chunk_tokens)
        with tracing.span("kvstore.supersede", tokens=len(ids)):
            self._port.branches.supersede(self.namespace, ids, first, unused_s)

    def plan(
        self,
        prompts: Iterable[Tokens],
        *,
        memory_tokens: int,
        decode_tokens: int | Sequence[int | None] | None = None,
    ) -> Plan:
        """Plans a batch: groups of prompts that share a prefix, and the order that computes the fewest tokens.

        ``memory_tokens`` is the KV of prefixes that the engine keeps, in tokens; 0: it keeps none. ``decode_tokens``
        are the expected output tokens of each prompt (None: not known), or of every one: of equals, those that decode
        more go first. Prompts share whole chunks. What the store holds is asked for in a few calls, and counts as free;
        a store that does not answer holds nothing. kvstore/planning/PLANNING.md has the algorithm and its bounds.
        """
        with tracing.span("kvstore.plan"):
            size = self.layout.chunk_tokens
            packed = Prompts.of_tokens(prompts, size)
            return make_plan(
                packed,
                memory_tokens=memory_tokens,
                decode_tokens=decode_tokens,
                chunk_tokens=size,
                storage=TokenStorage(self, packed),
            )

    def segments(self, rope: Rope, *, chunk_tokens: int = CHUNK_TOKENS) -> Segments:
        """Returns the segments of this model: KV computed alone, for reuse anywhere in a prompt behind a verdict.

        They are apart from this cache and never hits of it (kvstore/segments/SEGMENTS.md). ``rope`` has the RoPE
        settings (``kvstore.segments.Rope.of``), ``chunk_tokens`` the tokens of a stored piece. Raises InvalidRequest if
        keys of this layout cannot be rotated, Unavailable.
        """
        return Segments(self.namespace, rope, chunk_tokens, self._opened, self._port.shared)

    def clear(self) -> Cleared:
        """Deletes the stored chunks of this namespace, except those pinned in this store's metadata.

        Readers in progress get a miss. A store opened without etcd knows only its own pins.
        """
        return self._port.clear(self.namespace)

    def _opened(self, namespace: Namespace) -> Cache:
        self._port.open_namespace(namespace)
        return Cache(self._port, namespace, self._write)

    def _fill(self, target: KvArray, chunks_max: int, ids: TokenArray) -> int:
        filled = fillable(target)

        def memory(_: int) -> Sections:
            return planes_of(filled, self.layout)

        with tracing.span("kvstore.get", tokens=len(ids)):
            count = self._port.get(self.namespace, ids, chunks_max, memory) * self.layout.chunk_tokens
        if filled is not target:
            target[:, :, :count] = filled[:, :, :count]
        return count


class Hold:
    """A stored prefix, protected until released. Use it as a context, in one thread."""

    def __init__(self, held: PortHold, cache: Cache) -> None:
        self._owner = Owner()
        self._held = held
        self._cache = cache  # keeps the store open: an unreferenced store closes, which ends its holds
        self._layout = cache.layout
        self._released = False
        self.tokens = held.chunks * cache.layout.chunk_tokens
        """Number of leading tokens held, a multiple of chunk_tokens."""

    def read_into(self, array: KvArray) -> int:
        """Reads the held tokens into ``array``, of shape ``(layers, 2, m, kv_heads, head_dim)`` with m >= ``tokens``.

        Returns the number of leading tokens read and verified; fewer than held only if a chunk was lost. Raises
        HoldBroken if the hold has ended or its worker does not answer: the first ``tokens_valid`` tokens of ``array``
        are good then.
        """
        self._owner.check()
        target = target_array(array, self._layout)
        if target.shape[2] < self.tokens:
            raise InvalidRequest(
                f"array has room for {target.shape[2]} tokens: expected at least {self.tokens}, as held"
            )
        filled = fillable(target)
        with tracing.span("kvstore.get", tokens=self.tokens):
            count = self._held.read(planes_of(filled, self._layout)) * self._layout.chunk_tokens
        if filled is not target:
            target[:, :, :count] = filled[:, :, :count]
        return count

    def view(self) -> list[npt.NDArray[Any]]:
        """Returns the held chunks as read-only, verified arrays ``(layers, 2, chunk_tokens, kv_heads, head_dim)``.

        Without a copy if a worker on this host has them in memory, or this process has the root mounted as a file
        system. kvstore never changes or truncates a chunk file. In this process, what somebody else writes into one
        shows in the array after it was verified; a process that touches the part that somebody cut off is killed
        (SIGBUS). ``get`` has no such risk.
        """
        self._owner.check()
        return self._held.view()

    def layers(self, out: Sequence[KvArray] | None = None) -> Iterator[tuple[int, KvArray, KvArray]]:
        """Yields ``(layer, k, v)``, each of shape ``(tokens, kv_heads, head_dim)``.

        In this process the next ones are read meanwhile. Through a worker all chunks come before the first layer.

        With ``out``, arrays of shape ``(2, m, kv_heads, head_dim)`` with m >= ``tokens``, the layers are read into them
        in turn: of n arrays, a layer stays where it is until the one n - 2 behind it is asked for. Give three or more,
        or one for each layer. With one for each, or without ``out``, up to 32 MiB of layers are read at once, and twice
        as much ahead.

        Raises HoldBroken if a chunk is lost on the way; the first ``tokens_valid`` tokens are unaffected.
        """
        self._owner.check()
        layout, shape = self._layout, (2, self.tokens, self._layout.kv_heads, self._layout.head_dim)
        given = None if out is None else layer_arrays(out, layout, self.tokens)
        arrays: dict[int, KvArray] = {}

        def memory(layer: int) -> LayerMemory:
            array = np.empty(shape, layout.numpy_dtype) if given is None else given[layer % len(given)]
            arrays[layer] = array
            k, v = (plane.view(np.uint8).reshape(-1).data for plane in array)
            return LayerMemory(k, v)

        # Arrays that are used in turn hold no more than two layers ahead.
        band = 1
        if given is None or len(given) >= layout.layers:
            layer_bytes = self.tokens // layout.chunk_tokens * 2 * layout.section_bytes
            band = max(1, min(BAND_MAX, BAND_BYTES // max(1, layer_bytes)))
        for layer, _ in self._held.layers(memory, band):
            array = arrays.pop(layer)
            yield layer, array[0], array[1]

    def release(self) -> None:
        """Ends the protection; idempotent. Does nothing in a forked child: the hold is its parent's."""
        self._released = True
        if self._owner.is_here:
            self._held.release()

    def __repr__(self) -> str:
        return f"<kvstore.Hold {self.tokens} tokens{self._released * ', released'}, {self._cache!r}>"

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if self._owner.is_here and not self._released:
            release_dropped(self, self._held)
