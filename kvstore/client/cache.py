"""The cache of one namespace: the class that an engine calls. It checks arguments and calls a port."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Generic, Self, TypeVar, overload
from weakref import finalize

import numpy as np
import numpy.typing as npt

from kvstore.batch import Plan, PromptSet, TokenStorage, make_plan
from kvstore.batch.prompts import checked_prompts
from kvstore.client.operation import Operation
from kvstore.client.transport import PortBlockHold, PortHold, Protecting, Transport
from kvstore.core import tracing
from kvstore.core.address import BLOCK_KEY_BYTES_MAX, BLOCK_KEY_BYTES_MIN, TokenArray, Tokens
from kvstore.core.buffers import (
    KvArray,
    Pieces,
    Planes,
    address_of,
    fillable,
    layer_arrays,
    new_array,
    planes_of,
    source_array,
    target_array,
    token_array,
)
from kvstore.core.executor import Owner
from kvstore.core.namespace import Namespace
from kvstore.core.recency import Hints, Preset
from kvstore.core.results import Cleared, LayerMemory, PinRecord, PutResult, StoredBlocks
from kvstore.core.validate import (
    TierName,
    brief,
    checked_flag,
    checked_hold_ttl,
    checked_tier,
    checked_worker,
    is_unicode,
    kind_of,
    number,
    shown,
)
from kvstore.core.write_mode import WriteMode, WriteModeName
from kvstore.errors import InvalidRequest, Overloaded, StoreFull
from kvstore.format.header import DESCENT_BYTES_MAX, Ancestry, Descent
from kvstore.segments import CHUNK_TOKENS, Rope, Segments
from kvstore.transport.limits import BLOCK_BYTES_MAX, BLOCKS_MAX, DESCENTS_BYTES_MAX

# A store dropped before it was closed, or a hold dropped before its release, warns and still ends.


def close_when_dropped(port: Transport, close: Callable[[], None], name: str) -> finalize[..., Transport]:
    """Calls ``close``, with a ResourceWarning, once nothing refers to ``port``. Detach the finalizer before closing.

    ``close`` must not refer to the port, or the port would never be collected. Nothing happens when the interpreter
    ends: the threads are daemons, and the system closes the rest.
    """
    finalizer = finalize(port, _close_dropped, close, name, Owner())
    finalizer.atexit = False
    return finalizer


def _close_dropped(close: Callable[[], None], name: str, owner: Owner) -> None:
    if not owner.is_here:
        return  # a forked child: threads and connections belong to its parent
    _end_apart(close)
    # Last: this raises if warnings are errors.
    warnings.warn(
        f"kvstore: the store of {name} was dropped without close(); it is being closed now. Call close(), or use the "
        "store as a context (with ... as store:)",
        ResourceWarning,
        stacklevel=2,
    )


def _end_apart(end: Callable[[], None]) -> None:
    """Calls ``end`` in another thread: the garbage collector drops things in any thread at any point, perhaps while it
    has a lock that ending needs. So this takes no lock of ours.
    """
    with suppress(RuntimeError):  # no thread can start: the interpreter ends, or the system has no room
        threading.Thread(target=end, name="kvstore-closing", daemon=True).start()


def _span(name: str, **attributes: int) -> AbstractContextManager[Any]:
    return tracing.span(name, **attributes) if tracing.tracer is not None else tracing.NOTHING


G = TypeVar("G", bound=Protecting)
C = TypeVar("C")


class BaseHold(Generic[G, C]):
    """What a cache holds for its caller until it is released. Release it, or use it as a context, in one thread."""

    def __init__(self, held: G, cache: C) -> None:
        self._owner = Owner()
        self._held = held
        self._cache = cache  # keeps the store open: an unreferenced store closes, which ends its holds
        self._released = False

    def release(self) -> None:
        """Ends the protection; idempotent, never raises. Does nothing in a forked child: the hold is its parent's.

        Examples
        --------
        >>> hold = cache.hold(tokens)
        >>> hold.release()
        """
        self._released = True
        if self._owner.is_here:
            self._held.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        """Releases what was not released, with a ResourceWarning unless the hold is over or empty.

        The warning is about the line that dropped the hold; with tracemalloc it has the line that took it.
        """
        if not self._owner.is_here or self._released or sys.is_finalizing():
            return
        is_alive = self._held.protects
        _end_apart(self._held.release)
        if is_alive:  # last: this raises if warnings are errors
            warnings.warn(
                "kvstore: a hold was dropped without release(); it is being released now. Call release(), or use the "
                "hold as a context (with ... as hold:)",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )


# A pin: what a cache and a block cache return for what they pinned.


PIN_TTL_S_MAX = 30 * 86_400


class Pin:
    """A leased refcount on a stored prefix; ends by ``release``, as a context, or with its lease.

    Examples
    --------
    >>> with cache.pin(tokens, ttl=600) as pin:
    ...     pin.tokens, cache.refcount(tokens)
    (96, 1)
    >>> cache.refcount(tokens)
    0
    """

    def __init__(self, record: PinRecord, port: Transport) -> None:
        self.record = record
        self._port = port

    @property
    def id(self) -> str:
        """The id for ``kvstore unpin``; empty if nothing was pinned.

        Examples
        --------
        >>> cache.pin([1, 2, 3]).id
        ''
        """
        return self.record.id

    @property
    def tokens(self) -> int:
        """Number of leading tokens pinned.

        Examples
        --------
        >>> with cache.pin(tokens) as pin:
        ...     pin.tokens
        96
        """
        return self.record.tokens

    def release(self) -> bool:
        """Removes the pin; False if it had already ended. Raises Unavailable if etcd does not answer.

        Examples
        --------
        >>> pin = cache.pin(tokens)
        >>> pin.release(), pin.release()
        (True, False)
        """
        return bool(self.record.id) and self._port.unpin(self.record.id)

    def __repr__(self) -> str:
        about = f"{self.tokens} tokens of {self.record.namespace!r}, {shown(self.id)}" if self.id else "of nothing"
        return f"<kvstore.Pin {about}, {self._port.place}>"

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def check_pin(ttl: float, owner: str) -> None:
    """Raises InvalidRequest unless a pin can have these."""
    ttl_s = number(ttl)
    if ttl_s is None or not 1 <= ttl_s <= PIN_TTL_S_MAX:
        raise InvalidRequest(f"ttl={brief(ttl)}: expected 1 to {PIN_TTL_S_MAX} seconds")
    if not isinstance(owner, str):
        raise InvalidRequest(f"owner is {kind_of(owner)}: expected text")
    if not is_unicode(owner):
        raise InvalidRequest(f"owner={brief(owner)} is not valid Unicode")


# A refusal is a result of a put, unless the caller requires that all is stored.


R = TypeVar("R", PutResult, StoredBlocks)


def _checked(result: R, required: bool) -> R:
    """Returns the result. Raises Overloaded if a required put was stored in part."""
    if result.reason and required:
        kind = StoreFull if result.reason == StoreFull.reason else Overloaded
        raise kind("the store took only a part of this put, as memory had no room for the rest: put again later")
    return result


# Engine-hashed blocks: opaque bytes under the engine's own keys.


FIRST_MAX = (1 << 32) - 1
NO_DESCENTS: Sequence[Descent | bytes | None] = ()


class BlockCache:
    """Blocks of one namespace. Each key is 16 to 64 bytes; a buffer is any object with contiguous bytes.

    All methods raise InvalidRequest for wrong arguments. A call takes at most 65,536 blocks of 1 byte to 1 GiB each.
    """

    def __init__(self, port: Transport, namespace: Namespace, write: WriteMode | None = None) -> None:
        self._port = port
        self._namespace = namespace
        self._write = write

    def __repr__(self) -> str:
        return f"<kvstore.BlockCache {self._namespace.short}, {self._port.place}>"

    def put(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Any],
        *,
        first: int = 0,
        descents: Sequence[Descent | bytes | None] = NO_DESCENTS,
        priority: int | None = None,
        ttl: float | None = None,
        preset: Preset | None = None,
        write: WriteMode | WriteModeName | None = None,
        cache: bool = True,
        required: bool = False,
    ) -> StoredBlocks:
        """Stores each buffer under its key; returns True for each that is now in the store. First writer wins.

        The blocks are those of one prompt, in its order, and ``first`` is the index of the first of them: garbage
        collection takes a prompt's last blocks first, because an engine cannot use one without those before it.
        ``priority``, ``ttl`` and ``preset`` say how long to keep the blocks, and ``write``, ``cache`` and ``required``
        are as in ``Cache.put``. False means: the store refuses the block (the result's ``reason`` says why), the key
        has a block of another size, or garbage collection is taking it. Raises PermissionDenied or Unavailable.

        ``descents`` give for each block its tokens and the block before it, so that ``kvstore events`` can report it to
        routers: a Descent, its bytes (``Descent.pack``), or None. The store does not verify them; reads ignore them.
        """
        hints = Hints.of(priority, ttl, preset)
        checked = _checked_keys(keys)
        mode = self._write if write is None and cache is True else WriteMode.of_put(write, self._write, cache=cache)
        if isinstance(first, bool) or not isinstance(first, int | np.integer) or not 0 <= first <= FIRST_MAX:
            raise InvalidRequest(f"first={brief(first)}: expected a whole number from 0 to {FIRST_MAX}")
        ancestry = Ancestry(int(first), () if descents is NO_DESCENTS else _packed(checked, descents))
        views = _views(checked, buffers, writable=False)
        required = required is not False and checked_flag("required", required)
        with _span("kvstore.put_blocks", blocks=len(checked)):
            return self._put(checked, views, hints, mode, ancestry, required=required)

    def _put(
        self,
        keys: list[bytes],
        views: Pieces,
        hints: Hints,
        write: WriteMode | None,
        ancestry: Ancestry | None = None,
        *,
        required: bool = False,
    ) -> StoredBlocks:
        """Puts blocks. If the store refuses what it lacks, the result has what it had before."""
        try:
            return _checked(self._port.put_blocks(self._namespace, keys, views, hints, write, ancestry), required)
        except Overloaded as error:
            present = self._port.present_blocks(self._namespace, keys)
            if all(present):
                return StoredBlocks(present)
            if required:
                raise
            return StoredBlocks(present, error.reason)

    def match(self, keys: Sequence[bytes]) -> int:
        """Returns the number of leading keys that are in the store.

        Look up all blocks of a prompt, also those that you have in memory: what is found counts as used, so that
        garbage collection does not take a prompt's first blocks before the last ones. Also of ``present`` and ``hold``.
        """
        checked = _checked_keys(keys)
        with _span("kvstore.match_blocks", blocks=len(checked)):
            return self._port.match_blocks(self._namespace, checked)

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Returns, for each key, whether it is in the store; a miss does not end the lookup."""
        return self._port.present_blocks(self._namespace, _checked_keys(keys))

    def hold(self, keys: Sequence[bytes], ttl: float | None = None) -> BlockHold:
        """Looks up which keys are in the store, and protects those from garbage collection until released.

        The hold lasts at most ``ttl`` seconds, and no longer than the node's limit. Raises Overloaded if too many holds
        are alive.
        """
        ttl_s = None if ttl is None else checked_hold_ttl(ttl)
        return BlockHold(self._port.hold_blocks(self._namespace, _checked_keys(keys), ttl_s), self)

    def pin(self, keys: Sequence[bytes], ttl: float = 3600.0, owner: str = "") -> Pin:
        """Pins those of the blocks that are in the store, as ``Cache.pin`` does; ``pin.tokens`` says how many.

        A block counts as the layout's chunk_tokens tokens.
        """
        check_pin(ttl, owner)
        checked = _checked_keys(keys)
        with _span("kvstore.pin_blocks", blocks=len(checked)):
            return Pin(self._port.pin(self._namespace, checked, float(ttl), owner), self._port)

    def get(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> list[bool]:
        """Reads each block into its writable buffer, which must have the block's size.

        False is a miss: the content of that buffer is undefined. A block of another size is one. No buffer is touched
        after the return.
        """
        checked = _checked_keys(keys)
        views = _views(checked, buffers, writable=True)
        with _span("kvstore.get_blocks", blocks=len(checked)):
            return self._port.get_blocks(self._namespace, checked, views)


class BlockHold(BaseHold[PortBlockHold, BlockCache]):
    """Protected blocks that were in the store when the hold began. Release it, or use it as a context."""

    @property
    def present(self) -> list[bool]:
        """For each key, in the order asked for, whether its block is held."""
        return self._held.present

    def get(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> list[bool]:
        """Reads held blocks, as ``BlockCache.get`` does.

        Raises HoldBroken if the hold has ended or its worker does not answer.
        """
        self._owner.check()
        checked = _checked_keys(keys)
        return self._held.read(checked, _views(checked, buffers, writable=True))

    def __repr__(self) -> str:
        return f"<kvstore.BlockHold {sum(self.present)} of {len(self.present)} blocks, {self._cache!r}>"


def _checked_keys(keys: Sequence[bytes]) -> list[bytes]:
    if isinstance(keys, bytes | str) or not isinstance(keys, Sequence):
        raise InvalidRequest(f"keys are one {type(keys).__name__}: expected a list of bytes")
    if len(keys) > BLOCKS_MAX:
        raise InvalidRequest(f"{len(keys)} blocks are over the limit of {BLOCKS_MAX}: split the call")
    checked = list(keys)
    for position, key in enumerate(checked):
        if not isinstance(key, bytes) or not BLOCK_KEY_BYTES_MIN <= len(key) <= BLOCK_KEY_BYTES_MAX:
            said = f"{len(key)} bytes" if isinstance(key, bytes) else f"a {type(key).__name__}"
            raise InvalidRequest(
                f"key {position} is {said}: expected bytes, {BLOCK_KEY_BYTES_MIN} to {BLOCK_KEY_BYTES_MAX} of them"
            )
    return checked


def _packed(keys: list[bytes], descents: Sequence[Descent | bytes | None]) -> Sequence[bytes]:
    """Returns descents as bytes, b"" for none; nothing if there are none at all. Raises InvalidRequest."""
    if isinstance(descents, bytes | str) or not isinstance(descents, Sequence):
        raise InvalidRequest(f"descents are {kind_of(descents)}: expected a list, one or None for each key")
    if not descents:
        return ()
    for position, each in enumerate(descents):
        if each is not None and not isinstance(each, Descent | bytes):
            raise InvalidRequest(f"descent {position} is {kind_of(each)}: expected kvstore.Descent, or bytes")
    if len(descents) != len(keys):
        raise InvalidRequest(f"{len(descents)} descents for {len(keys)} keys: expected one, or None, for each")
    packed = [each.pack() if isinstance(each, Descent) else each or b"" for each in descents]
    if max(map(len, packed)) > DESCENT_BYTES_MAX or sum(map(len, packed)) + 2 * len(packed) > DESCENTS_BYTES_MAX:
        raise InvalidRequest(
            f"descents have {sum(map(len, packed))} bytes: expected at most {DESCENT_BYTES_MAX} each, and "
            f"{DESCENTS_BYTES_MAX} together; split the call"
        )
    return packed


def _views(keys: list[bytes], buffers: Sequence[Any], *, writable: bool) -> Pieces:
    if not isinstance(buffers, Sequence):
        raise InvalidRequest(f"buffers are {kind_of(buffers)}: expected a list, one for each key")
    if len(buffers) != len(keys):
        raise InvalidRequest(f"{len(buffers)} buffers for {len(keys)} keys: expected one for each")
    views = [_view(buffer, position, writable=writable) for position, buffer in enumerate(buffers)]
    if writable and len(views) > 1:
        _check_apart(views)
    return views


def _check_apart(views: Pieces) -> None:
    """Raises InvalidRequest if two buffers share memory: a block read into one would look like damage in the other."""
    starts = np.fromiter(map(address_of, views), np.uint64, len(views))
    order = np.argsort(starts)
    ends = starts + np.fromiter(map(len, views), np.uint64, len(views))
    shared = np.flatnonzero(starts[order[1:]] < ends[order[:-1]])
    if len(shared):
        one, other = sorted(order[shared[0] : shared[0] + 2].tolist())
        raise InvalidRequest(f"buffers {one} and {other} share memory: give each block memory of its own")


def _view(buffer: Any, position: int, *, writable: bool) -> memoryview:
    """Returns the buffer's bytes as a flat view. Raises InvalidRequest."""
    try:
        view = memoryview(buffer).cast("B")
    except (TypeError, ValueError) as cause:
        if not isinstance(buffer, np.ndarray):
            raise InvalidRequest(f"buffer {position} is {kind_of(buffer)}: expected contiguous bytes") from cause
        if not buffer.flags.c_contiguous:
            raise InvalidRequest(f"buffer {position} is not contiguous: give a contiguous array") from cause
        # numpy's bfloat16 and float8 have no buffer format.
        view = buffer.reshape(-1).view(np.uint8).data
    if writable and view.readonly:
        raise InvalidRequest(f"buffer {position} is read-only: give a writable one")
    if not 1 <= len(view) <= BLOCK_BYTES_MAX:
        raise InvalidRequest(f"buffer {position} has {len(view)} bytes: expected 1 to {BLOCK_BYTES_MAX}")
    return view


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
    raise InvalidRequest for invalid arguments. A miss is a value, never an exception.

    Attributes
    ----------
    namespace, layout
        What the cache was opened with.
    blocks
        The ``BlockCache`` of the same namespace, for blocks that an engine hashed.

    Examples
    --------
    >>> cache.match(tokens)  # six full chunks of 16 tokens are stored
    96
    """

    def __init__(self, port: Transport, namespace: Namespace, write: WriteMode | None = None) -> None:
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

        The first writer wins: an existing chunk is never replaced. No reference to ``kv`` is kept.

        Parameters
        ----------
        tokens
            The whole prompt.
        kv
            Array of shape ``(layers, 2, len(tokens) - prefix, kv_heads, head_dim)``, K then V. It need not be
            C-contiguous.
        prefix
            Leading tokens that ``kv`` leaves out, a multiple of chunk_tokens. If one of their chunks is missing,
            nothing is stored.
        priority
            0 to 100, 35 by default: chunks with a lower one are deleted first.
        ttl
            Seconds since the last use after which chunks may be deleted even if there is space; never by default.
            Rounded up to 5 min, 30 min, 2 h, 12 h, 3 days or 30 days.
        preset
            Sets both: "chat", "analytics", "rag" or "batch" (``kvstore.core.recency.PRESETS``); explicit values win.
            Chunks that exist, the prefix included, are raised to these values, never lowered.
        write
            "behind" returns once memory has the chunks, which are lost if the node is killed before the root has them.
            "through" returns once the root has them, with a copy in memory. By default the namespace's, or else the
            node's.
        cache
            False writes through without the copy in memory.
        required
            Raise Overloaded if the store refuses a part.

        Returns
        -------
        PutResult
            ``tokens_present`` leading tokens are in the store. If the store refused a part (no space, or too much
            load), ``reason`` says why; for a cache that is an ordinary outcome.

        Raises
        ------
        PermissionDenied, Unavailable
            The latter if the store did not answer in time: retry.

        Examples
        --------
        >>> cache.put(tokens, kv).tokens_present
        96
        >>> longer = tokens + list(range(60))
        >>> cache.put(longer, np.zeros(layout.shape(64), np.float16), prefix=96, preset="chat").tokens_present
        160
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
        mode = self._write if write is None and cache is True else WriteMode.of_put(write, self._write, cache=cache)
        required = required is not False and checked_flag("required", required)
        with _span("kvstore.put", tokens=len(ids)):
            try:
                return _checked(self._port.put(self.namespace, ids, first, source, hints, mode), required)
            except Overloaded as error:
                present = self._port.match(self.namespace, ids, counts=False)
                if present == len(ids) // size:
                    return PutResult(present * size, 0, present - first, 0)
                if required:
                    raise
                return PutResult(present * size, 0, 0, 0, error.reason)

    def match(self, tokens: Tokens, *, counts: bool = True) -> int:
        """Returns the number of leading tokens in the store, a multiple of chunk_tokens.

        Parameters
        ----------
        tokens
            The prompt.
        counts
            False leaves this look-up out of the hit ratio, as before a get or hold of the same prompt.

        Examples
        --------
        >>> cache.match(tokens), cache.match(tokens[:40] + [7])
        (96, 32)
        """
        ids, counts = token_array(tokens), counts is True or checked_flag("counts", counts)
        with _span("kvstore.match", tokens=len(ids)):
            return self._port.match(self.namespace, ids, counts=counts) * self.layout.chunk_tokens

    def match_each(self, prompts: Iterable[Tokens]) -> list[int]:
        """Returns ``match`` of each prompt, from a few calls to the store; the hit ratio leaves them out.

        Prompts with a common prefix should follow one another: the store hashes the prefix only once. A prompt without
        an answer within a minute counts as not stored.

        Examples
        --------
        >>> cache.match_each([tokens, tokens[:40], [1, 2, 3]])
        [96, 32, 0]
        """
        left, size = map(token_array, checked_prompts(prompts)), self.layout.chunk_tokens
        counts, call, tokens, following = list[int](), list[TokenArray](), 0, next(left, None)
        ends_s = time.monotonic() + EACH_S
        with _span("kvstore.match_each"):
            while time.monotonic() < ends_s:
                while following is not None and (
                    not call or (len(call) < PROMPTS_MAX and tokens + len(following) <= TOKENS_MAX)
                ):
                    call.append(following)
                    tokens, following = tokens + len(following), next(left, None)
                found = self._port.match_each(self.namespace, call) if call else []
                if not found:
                    break
                counts += [min(count, len(each) // size) * size for count, each in zip(found, call, strict=False)]
                tokens -= sum(map(len, call[: len(found)]))
                call = call[len(found) :]
        return counts + [0] * (len(call) + (following is not None) + sum(1 for _ in left))

    @overload
    def get(self, tokens: Tokens) -> tuple[int, KvArray]: ...

    @overload
    def get(self, tokens: Tokens, out: KvArray) -> int: ...

    def get(self, tokens: Tokens, out: KvArray | None = None) -> tuple[int, KvArray] | int:
        """Reads the longest stored prefix, every byte verified.

        Parameters
        ----------
        tokens
            The prompt.
        out
            Array of shape ``(layers, 2, m, kv_heads, head_dim)`` to read at most m tokens into, without a copy. It is
            filled fastest if it begins at a page, and not touched after the return.

        Returns
        -------
        n, array
            The number of tokens read, and without ``out`` an array ``(layers, 2, n, kv_heads, head_dim)``. The content
            of ``out`` after the first n tokens is undefined.

        Examples
        --------
        >>> count, found = cache.get(tokens + [7, 8, 9])
        >>> count, np.array_equal(found, kv[:, :, :96])
        (96, True)
        >>> cache.get(tokens, out=np.empty(layout.shape(32), np.float16))
        32
        """
        ids = token_array(tokens)
        layout = self.layout
        chunks_max = len(ids) // layout.chunk_tokens
        if out is not None:
            target = target_array(out, layout)
            return self._fill(target, min(chunks_max, target.shape[2] // layout.chunk_tokens), ids)
        array = new_array(layout.shape(0), layout.numpy_dtype)

        def memory(count: int) -> Planes:
            nonlocal array
            array = new_array(layout.shape(count * layout.chunk_tokens), layout.numpy_dtype)
            return planes_of(array, layout)

        with _span("kvstore.get", tokens=len(ids)):
            count = self._port.get(self.namespace, ids, chunks_max, memory) * layout.chunk_tokens
        return count, array[:, :, :count]

    def hold(self, tokens: Tokens, ttl: float | None = None, *, counts: bool = True) -> Hold:
        """Holds the longest stored prefix: protects it from garbage collection until released.

        Use it as a context, and read through it.

        Parameters
        ----------
        tokens
            The prompt.
        ttl
            Seconds after which the hold ends by itself, at most 300.
        counts
            False leaves this look-up out of the hit ratio.

        Raises
        ------
        Overloaded
            Too many holds are alive.

        Examples
        --------
        >>> with cache.hold(tokens) as hold:
        ...     hold.tokens, hold.read_into(np.empty(layout.shape(96), np.float16))
        (96, 96)
        """
        ttl_s = None if ttl is None else checked_hold_ttl(ttl)
        ids, counts = token_array(tokens), counts is True or checked_flag("counts", counts)
        with _span("kvstore.hold", tokens=len(ids)):
            return Hold(self._port.hold(self.namespace, ids, ttl_s, counts=counts), self)

    def pin(self, tokens: Tokens, ttl: float = 3600.0, owner: str = "") -> Pin:
        """Pins the longest stored prefix: a leased refcount, visible to the cluster, that ends after ``ttl`` seconds.

        In a cluster, and in a folder on a disk of this host, it outlives this process. Any other store that was opened
        without etcd forgets it on close, and no other process sees it.

        Parameters
        ----------
        tokens
            The prompt.
        ttl
            1 second to 30 days.
        owner
            Shown by ``kvstore ls --pins``.

        Returns
        -------
        Pin
            ``pin.tokens`` is the number of tokens pinned; 0 if nothing is stored.

        Raises
        ------
        Unavailable
            etcd does not answer.
        SessionLost
            The node's session just ended.

        Examples
        --------
        >>> with cache.pin(tokens, ttl=600, owner="job-7") as pin:
        ...     pin.tokens
        96
        """
        check_pin(ttl, owner)
        ids = token_array(tokens)
        with _span("kvstore.pin", tokens=len(ids)):
            return Pin(self._port.pin(self.namespace, ids, float(ttl), owner), self._port)

    def refcount(self, tokens: Tokens) -> int:
        """Returns the number of live pins that cover all full chunks of ``tokens``.

        Examples
        --------
        >>> with cache.pin(tokens):
        ...     cache.refcount(tokens)
        1
        """
        return self._port.refcount(self.namespace, token_array(tokens))

    def prefetch(self, tokens: Tokens, tier: TierName = "memory", worker: str | None = None) -> Operation:
        """Begins to bring the longest stored prefix into memory, or onto the local disk (``tier="disk"``).

        It uses free space only.

        Parameters
        ----------
        tokens
            The prompt.
        tier
            "memory" or "disk".
        worker
            Address of the worker that does it; by default the one that would serve the prompt.

        Returns
        -------
        Operation
            It counts tokens.

        Raises
        ------
        InvalidRequest
            The node has no such tier.
        Overloaded
            Too many operations are unfinished.
        Unavailable
            No worker answers.

        Examples
        --------
        >>> operation = cache.prefetch(tokens)
        >>> operation.wait(timeout=60), operation.done
        (True, 96)
        """
        ids, tier = token_array(tokens), checked_tier(tier)
        return self._port.prefetch(self.namespace, ids, tier, checked_worker(worker))

    def evict_first(self, tokens: Tokens) -> None:
        """Hints that a prompt is not needed soon: memory and the local disk evict its chunks first.

        Nothing is lost, and the next use of a chunk ends it. On the root the chunks keep their rank.
        Raises Unavailable if no worker answers.

        Examples
        --------
        >>> cache.evict_first(tokens)
        """
        self._port.evict_first(self.namespace, token_array(tokens))

    def plan(self, prompts: Iterable[Tokens], *, memory_tokens: int) -> Plan:
        """Plans a batch: groups of prompts that share a prefix, and the order that computes the fewest tokens.

        Stored prefixes count as free; a store that does not answer holds nothing. kvstore/batch/PLANNING.md has the
        algorithm and its bounds.

        Parameters
        ----------
        prompts
            The prompts of the batch; they share full chunks.
        memory_tokens
            KV of prefixes that the engine keeps, in tokens; 0: it keeps none.

        Examples
        --------
        >>> first, second = list(range(64)), list(range(500, 564))
        >>> plan = cache.plan([first + [1], second + [2], first + [3], second + [4]], memory_tokens=1000)
        >>> plan.order, plan.tokens_total, plan.tokens_to_compute
        ([0, 2, 1, 3], 260, 132)
        """
        with _span("kvstore.plan"):
            size = self.layout.chunk_tokens
            packed = PromptSet.of_tokens(prompts, size)
            return make_plan(packed, memory_tokens=memory_tokens, chunk_tokens=size, storage=TokenStorage(self, packed))

    def segments(self, rope: Rope, *, chunk_tokens: int = CHUNK_TOKENS) -> Segments:
        """Returns the segments of this model: KV computed alone, for reuse anywhere in a prompt after a verdict.

        Segments are separate from this cache and never hits of it (kvstore/segments/SEGMENTS.md).

        Parameters
        ----------
        rope
            RoPE settings (``kvstore.segments.Rope.of``).
        chunk_tokens
            Tokens of a stored piece.

        Raises
        ------
        InvalidRequest
            Keys of this layout cannot be rotated.
        Unavailable
            The store does not answer.

        Examples
        --------
        >>> from kvstore.segments import Rope
        >>> rope = Rope.of({"rope_theta": 10000.0, "head_dim": 64, "max_position_embeddings": 4096})
        >>> cache.segments(rope, chunk_tokens=16).find(tokens)
        []
        """
        return Segments(self.namespace, rope, chunk_tokens, self._opened, self._port.shared)

    def clear(self) -> Cleared:
        """Deletes the stored chunks of this namespace, except those pinned in this store's metadata.

        Readers in progress get a miss; without etcd, what they hold is waited for, 5 s at most. A store opened without
        etcd knows only its own pins.

        Raises
        ------
        Unavailable
            If chunks stay, because they are in use or the root refuses: clear again.

        Examples
        --------
        >>> cache.clear().chunks
        6
        """
        return self._port.clear(self.namespace)

    def _opened(self, namespace: Namespace) -> Cache:
        self._port.open_namespace(namespace)
        return Cache(self._port, namespace, self._write)

    def _fill(self, target: KvArray, chunks_max: int, ids: TokenArray) -> int:
        filled = fillable(target)

        def memory(_: int) -> Planes:
            return planes_of(filled, self.layout)

        with _span("kvstore.get", tokens=len(ids)):
            count = self._port.get(self.namespace, ids, chunks_max, memory) * self.layout.chunk_tokens
        if filled is not target:
            target[:, :, :count] = filled[:, :, :count]
        return count


class Hold(BaseHold[PortHold, Cache]):
    """A stored prefix, protected until released. Use it as a context, in one thread.

    Attributes
    ----------
    tokens
        Number of leading tokens held, a multiple of chunk_tokens.

    Examples
    --------
    >>> with cache.hold(tokens) as hold:
    ...     hold.tokens
    96
    """

    def __init__(self, held: PortHold, cache: Cache) -> None:
        super().__init__(held, cache)
        self._layout = cache.layout
        self.tokens = held.chunks * cache.layout.chunk_tokens
        """Number of leading tokens held, a multiple of chunk_tokens."""

    def read_into(self, array: KvArray) -> int:
        """Reads the held tokens into ``array``, of shape ``(layers, 2, m, kv_heads, head_dim)`` with m >= ``tokens``.

        Returns
        -------
        int
            Number of leading tokens read and verified; fewer than held only if a chunk was lost.

        Raises
        ------
        HoldBroken
            The hold has ended, or its worker does not answer. The first ``tokens_valid`` tokens of ``array`` are valid
            then.

        Examples
        --------
        >>> with cache.hold(tokens) as hold:
        ...     hold.read_into(np.empty(layout.shape(hold.tokens), np.float16))
        96
        """
        self._owner.check()
        target = target_array(array, self._layout)
        if target.shape[2] < self.tokens:
            raise InvalidRequest(
                f"array has room for {target.shape[2]} tokens: expected at least {self.tokens}, as held"
            )
        filled = fillable(target)
        with _span("kvstore.get", tokens=self.tokens):
            count = self._held.read(planes_of(filled, self._layout)) * self._layout.chunk_tokens
        if filled is not target:
            target[:, :, :count] = filled[:, :, :count]
        return count

    def view(self) -> list[npt.NDArray[Any]]:
        """Returns the held chunks as read-only, verified arrays ``(layers, 2, chunk_tokens, kv_heads, head_dim)``.

        They are not copied if a worker on this host has them in memory, or if this process has the root mounted as a
        file system. kvstore never changes or truncates a chunk file. If another program changes one, an array mapped in
        this process shows the change after verification. If it truncates one, a process that touches the missing part
        is killed (SIGBUS). ``get`` has no such risk. In a forked child the arrays are not kept: other chunks may take
        their memory.

        Examples
        --------
        >>> with cache.hold(tokens) as hold:
        ...     [chunk.shape for chunk in hold.view()][:1]
        [(4, 2, 16, 2, 64)]
        """
        self._owner.check()
        return self._held.view()

    def layers(self, out: Sequence[KvArray] | None = None) -> Iterator[tuple[int, KvArray, KvArray]]:
        """Yields ``(layer, k, v)``, each of shape ``(tokens, kv_heads, head_dim)``.

        In this process the next layers are read while you use one. A worker sends all chunks before the first layer.

        Parameters
        ----------
        out
            Arrays of shape ``(2, m, kv_heads, head_dim)`` with m >= ``tokens``, used in turn: of n arrays, a layer
            stays until the layer n - 2 after it is requested. Give three or more, or one for each layer. With one for
            each, or without ``out``, up to 32 MiB of layers are read together, and twice as much ahead.

        Raises
        ------
        HoldBroken
            A chunk is lost on the way; the first ``tokens_valid`` tokens are unaffected.

        Examples
        --------
        >>> with cache.hold(tokens) as hold:
        ...     for layer, k, v in hold.layers():
        ...         print(layer, k.shape)
        0 (96, 2, 64)
        1 (96, 2, 64)
        2 (96, 2, 64)
        3 (96, 2, 64)
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

    def __repr__(self) -> str:
        return f"<kvstore.Hold {self.tokens} tokens{self._released * ', released'}, {self._cache!r}>"
