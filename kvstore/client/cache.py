"""The cache of one namespace: what an engine calls. Checks what it is given, and speaks to a port."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from kvstore import tracing
from kvstore.client.arrays import KvArray, fillable, source_array, target_array
from kvstore.client.blocks import BlockCache
from kvstore.client.owner import Owner
from kvstore.client.port import Port, PortHold
from kvstore.client.tickets import Ticket
from kvstore.errors import InvalidRequest
from kvstore.hints import Hints
from kvstore.namespace import Namespace
from kvstore.node.moves import Act, Level
from kvstore.results import Cleared, LayerMemory, PinRecord, PutResult
from kvstore.sections import Sections, planes_of
from kvstore.tokens import TokenArray, Tokens, token_array
from kvstore.writes import WriteMode

PIN_TTL_S_MAX = 30 * 86_400


class Cache:
    """KV of one namespace, by tokens. Thread-safe. Made by ``Store.namespace``.

    ``tokens`` is any sequence of ints or an integer array, 0 <= id < 2**32, at most 4,194,304 of them.
    All methods raise InvalidRequest for arguments that are wrong; a miss is a value, never an exception.
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
        preset: str | None = None,
        write: WriteMode | str | None = None,
    ) -> PutResult:
        """Stores the KV of ``tokens``; only full chunks are stored.

        ``kv`` has shape ``(layers, 2, len(tokens) - prefix, kv_heads, head_dim)``, K then V; it may be a view that is
        not C-contiguous, and no reference to it is kept.  The first ``prefix`` tokens, a multiple of chunk_tokens,
        are in the store already; where one of their chunks is missing nothing is stored, and ``tokens_present`` says
        up to where the store goes.  First writer wins: what is there already is not replaced.

        How long the chunks are worth keeping: ``priority`` is 0 to 100 (35 by default), lower ones going first where
        room is needed; ``ttl`` is in seconds since the last use, after which they may go even if there is room (by
        default never), rounded up to 5 min, 30 min, 2 h, 12 h, 3 days or 30 days.  ``preset`` gives both: chat,
        analytics, rag or batch (``kvstore.hints.PRESETS``); explicit values win.  Those of chunks that are there
        already, the prefix included, are raised to these, never lowered.  They protect nothing; pins do.

        On a node with memory ``write`` says when this returns: "behind" once memory has the chunks, which are written
        to the root soon and lost where the node is killed before; "through" once the root has them, with a copy in
        memory; "around" once the root has them.  By default as the namespace says, or else the node.

        Raises Overloaded (no space, too much at once: back off), PermissionDenied, Unavailable (not in time: retry).
        """
        hints = Hints.of(priority, ttl, preset)
        ids = token_array(tokens)
        size = self.layout.chunk_tokens
        if not isinstance(prefix, int | np.integer) or not 0 <= prefix <= len(ids) or prefix % size:
            raise InvalidRequest(
                f"prefix={prefix!r}: expected a multiple of chunk_tokens ({size}) from 0 to {len(ids)}, the token count"
            )
        array = source_array(kv, self.layout, len(ids) - int(prefix))
        first = int(prefix) // size
        source = planes_of(array, self.layout, first)
        mode = self._write if write is None else WriteMode.of(write)
        with tracing.span("kvstore.put", tokens=len(ids)):
            return self._port.put(self.namespace, ids, first, source, hints, mode)

    def match(self, tokens: Tokens) -> int:
        """How many leading tokens are in the store, a multiple of chunk_tokens."""
        ids = token_array(tokens)
        with tracing.span("kvstore.match", tokens=len(ids)):
            return self._port.match(self.namespace, ids) * self.layout.chunk_tokens

    @overload
    def get(self, tokens: Tokens) -> tuple[int, KvArray]: ...

    @overload
    def get(self, tokens: Tokens, out: KvArray) -> int: ...

    def get(self, tokens: Tokens, out: KvArray | None = None) -> tuple[int, KvArray] | int:
        """Reads the longest stored prefix, every byte verified.

        Without ``out``: ``(n, array)``, the array of shape ``(layers, 2, n, kv_heads, head_dim)``.
        With ``out``, of shape ``(layers, 2, m, kv_heads, head_dim)``: reads at most its m tokens straight into it and
        returns n.  What lies behind the first n tokens of it is undefined, and not touched after the return.
        """
        ids = token_array(tokens)
        layout = self.layout
        chunks_max = len(ids) // layout.chunk_tokens
        if out is not None:
            target = target_array(out, layout)
            return self._fill(target, min(chunks_max, target.shape[2] // layout.chunk_tokens), ids)
        array = np.empty(layout.shape(0), layout.numpy_dtype)

        def memory(count: int) -> Sections:
            nonlocal array
            array = np.empty(layout.shape(count * layout.chunk_tokens), layout.numpy_dtype)
            return planes_of(array, layout)

        with tracing.span("kvstore.get", tokens=len(ids)):
            count = self._port.get(self.namespace, ids, chunks_max, memory) * layout.chunk_tokens
        return count, array[:, :, :count]

    def hold(self, tokens: Tokens, ttl: float | None = None) -> Hold:
        """Holds the longest stored prefix: protected from garbage collection until released, at most ``ttl`` seconds.

        Use it as a context. Raises Overloaded where too many holds are alive.
        """
        if ttl is not None and not (isinstance(ttl, int | float) and ttl > 0):
            raise InvalidRequest(f"ttl={ttl!r}: expected a positive number of seconds")
        ids = token_array(tokens)
        with tracing.span("kvstore.hold", tokens=len(ids)):
            return Hold(self._port.hold(self.namespace, ids, ttl), self)

    def pin(self, tokens: Tokens, ttl: float = 3600.0, owner: str = "") -> Pin:
        """Pins the longest stored prefix: a leased refcount, visible to the cluster, that ends after ``ttl`` seconds.

        In a cluster, and in a folder on a disk of this host, it outlives this process; any other store that was opened
        without etcd forgets it when it is closed, and nobody else sees it.  ``pin.tokens`` says how much is pinned; 0
        where nothing is stored.
        Raises Unavailable where etcd does not answer, SessionLost where the node's session just ended.
        """
        if not isinstance(ttl, int | float) or not 1 <= ttl <= PIN_TTL_S_MAX:
            raise InvalidRequest(f"ttl={ttl!r}: expected 1 to {PIN_TTL_S_MAX} seconds")
        if not isinstance(owner, str):
            raise InvalidRequest(f"owner is a {type(owner).__name__}: expected text")
        ids = token_array(tokens)
        with tracing.span("kvstore.pin", tokens=len(ids)):
            return Pin(self._port.pin(self.namespace, ids, float(ttl), owner), self._port)

    def refcount(self, tokens: Tokens) -> int:
        """How many live pins cover all full chunks of ``tokens``."""
        return self._port.refcount(self.namespace, token_array(tokens))

    def prefetch(self, tokens: Tokens, tier: str = "memory") -> Ticket:
        """Begins to bring the longest stored prefix into the node's memory, or onto its local disk (``tier="disk"``).

        Returns at once; the ticket says how far it is.  As far as there is room: nothing that is in use goes for it.
        Raises InvalidRequest where the node has no such tier, Overloaded where too many are not done, Unavailable.
        """
        return self._begin(tokens, Act.PREFETCH, Level.of(tier))

    def move(self, tokens: Tokens, tier: str) -> Ticket:
        """As ``prefetch``, and takes the prefix away from the tiers that are nearer: "memory", "disk" or "root".

        What is not on the root yet is written there before it goes.  What others use or pin, and what is continued by
        other prompts in a tier, stays in it.
        """
        return self._begin(tokens, Act.MOVE, Level.of(tier))

    def release(self, tokens: Tokens) -> Ticket:
        """Says that a prompt will not be needed soon: its chunks go first when memory or disk needs room.

        Nothing is lost, and whoever uses them ends this.  The ticket counts those in memory and on the disk.
        """
        return self._begin(tokens, Act.RELEASE, Level.MEMORY)

    def clear(self) -> Cleared:
        """Deletes the stored chunks of this namespace, except those pinned in the metadata this store is opened with.

        Whoever reads one now has a miss. Opened without etcd, a store knows no pins but its own.
        """
        return self._port.clear(self.namespace)

    def _begin(self, tokens: Tokens, act: Act, level: Level) -> Ticket:
        move = self._port.move(self.namespace, token_array(tokens), act, level)
        return Ticket(move, self.layout.chunk_tokens)

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
    """A stored prefix that is protected until released. Use it as a context, by one thread."""

    def __init__(self, held: PortHold, cache: Cache) -> None:
        self._owner = Owner()
        self._held = held
        self._cache = cache  # keeps the store open: one that nobody refers to closes, and ends its holds
        self._layout = cache.layout
        self._released = False
        self.tokens = held.chunks * cache.layout.chunk_tokens
        """Leading tokens that are held, a multiple of chunk_tokens."""

    def read_into(self, array: KvArray) -> int:
        """Reads what is held into ``array``, of shape ``(layers, 2, m, kv_heads, head_dim)`` with m >= ``tokens``.

        Returns the leading tokens read and verified; fewer than held only where a chunk was lost.
        Raises HoldBroken where the hold has ended, or its worker does not answer: what is in ``array`` then is good for
        its ``tokens_valid`` leading tokens.
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
        """The held chunks as read-only arrays of shape ``(layers, 2, chunk_tokens, kv_heads, head_dim)``, verified.

        Mapped from the root without a copy where the root is a mounted file system and opened in this process, or by
        a worker on this host. kvstore never truncates a chunk's file; where somebody else does, a process that touches
        what a mapping has lost is killed (SIGBUS). A ``get`` has no such limit.
        """
        self._owner.check()
        return self._held.view()

    def layers(self) -> Iterator[tuple[int, KvArray, KvArray]]:
        """Yields ``(layer, k, v)``, each of shape ``(tokens, kv_heads, head_dim)``, the next layer being read
        meanwhile.

        Raises HoldBroken where a chunk is lost on the way; its ``tokens_valid`` says what is unaffected.
        """
        self._owner.check()
        layout, shape = self._layout, (2, self.tokens, self._layout.kv_heads, self._layout.head_dim)
        arrays: dict[int, KvArray] = {}

        def memory(layer: int) -> LayerMemory:
            arrays[layer] = np.empty(shape, layout.numpy_dtype)
            raw = arrays[layer].view(np.uint8).reshape(2, -1)
            return LayerMemory(raw[0].data, raw[1].data)

        for layer, _ in self._held.layers(memory):
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


class Pin:
    """A leased refcount on a stored prefix; ends by ``release``, as a context, or when its lease ends."""

    def __init__(self, record: PinRecord, port: Port) -> None:
        self.record = record
        self._port = port

    @property
    def id(self) -> str:
        """What ``kvstore unpin`` takes; empty where nothing was pinned."""
        return self.record.id

    @property
    def tokens(self) -> int:
        """Leading tokens that are pinned."""
        return self.record.tokens

    def release(self) -> bool:
        """Removes the pin; False where it had ended already. Raises Unavailable where etcd does not answer."""
        return bool(self.record.id) and self._port.unpin(self.record.id)

    def __repr__(self) -> str:
        about = f"{self.tokens} tokens of {self.record.namespace!r}, {self.id}" if self.id else "of nothing"
        return f"<kvstore.Pin {about}, {self._port.place}>"

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
