"""Engine-hashed blocks: opaque bytes under the engine's own keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvstore import tracing
from kvstore.address import BLOCK_KEY_BYTES_MAX, BLOCK_KEY_BYTES_MIN
from kvstore.brief import brief, kind_of
from kvstore.buffers import Pieces, address_of
from kvstore.checks import checked_hold_ttl
from kvstore.client.dropping import release_dropped
from kvstore.client.owner import Owner
from kvstore.client.pin import Pin, check_pin
from kvstore.client.port import Port, PortBlockHold
from kvstore.client.refusals import put_blocks
from kvstore.errors import InvalidRequest, WrongSize
from kvstore.format.header import DESCENT_BYTES_MAX, Ancestry, Descent
from kvstore.hints import DEFAULT, Hints, Preset, checked_unused_s
from kvstore.namespace import Namespace
from kvstore.planning import KeyStorage, Plan, Prompts, make_plan
from kvstore.planning.prompts import checked_prompts
from kvstore.results import StoredBlocks
from kvstore.wire.limits import BLOCK_BYTES_MAX, BLOCKS_MAX, DESCENTS_BYTES_MAX
from kvstore.writes import WriteMode, WriteModeName

FIRST_MAX = (1 << 32) - 1
NO_DESCENTS: Sequence[Descent | bytes | None] = ()


class BlockCache:
    """Blocks of one namespace. Each key is 16 to 64 bytes; a buffer is any object with contiguous bytes.

    All methods raise InvalidRequest for wrong arguments. A call takes at most 65,536 blocks of 1 byte to 1 GiB each.
    """

    def __init__(self, port: Port, namespace: Namespace, write: WriteMode | None = None) -> None:
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

        ``descents`` say for each block what its tokens are and which block is before it, so that ``kvstore events`` can
        tell routers of it: a Descent, its bytes (``Descent.pack``), or None. Nobody verifies them, and reads ignore
        them.
        """
        hints = Hints.of(priority, ttl, preset)
        checked = _checked_keys(keys)
        mode = self._write  # of the namespace, unless this put asks for another
        if write is not None or cache is not True:
            mode = WriteMode.of_put(write, self._write, cache=cache)
        if isinstance(first, bool) or not isinstance(first, int | np.integer) or not 0 <= first <= FIRST_MAX:
            raise InvalidRequest(f"first={brief(first)}: expected a whole number from 0 to {FIRST_MAX}")
        ancestry = Ancestry(int(first), () if descents is NO_DESCENTS else _packed(checked, descents))
        views = _views(checked, buffers, writable=False)
        with tracing.span("kvstore.put_blocks", blocks=len(checked)):
            return put_blocks(self._port, self._namespace, checked, views, hints, mode, ancestry, required=required)

    def put_new(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> StoredBlocks:
        """Stores each buffer under its key, as ``put`` does; ``fresh`` says which of the blocks this call wrote.

        Through a worker only those are sent that the store lacks; then a block of another size counts as stored, and
        one that somebody else wrote meanwhile, or that is given twice, as written by this call.
        """
        checked = _checked_keys(keys)
        views = _views(checked, buffers, writable=False)
        with tracing.span("kvstore.put_blocks", blocks=len(checked)):
            if self._port.tells_fresh:
                return put_blocks(self._port, self._namespace, checked, views, DEFAULT, self._write)
            stored, fresh = self._port.present_blocks(self._namespace, checked), [False] * len(checked)
            lacking = [at for at, found in enumerate(stored) if not found]
            part = [checked[at] for at in lacking], [views[at] for at in lacking]
            done = put_blocks(self._port, self._namespace, *part, DEFAULT, self._write)
            for at, is_stored, is_fresh in zip(lacking, done, done.fresh, strict=True):
                stored[at], fresh[at] = is_stored, is_fresh
            return StoredBlocks(stored, fresh, done.reason)

    def match(self, keys: Sequence[bytes]) -> int:
        """Returns the number of leading keys that are in the store.

        Look up all blocks of a prompt, also those that you have in memory: what is found counts as used, so that
        garbage collection does not take a prompt's first blocks before the last ones. Also of ``present`` and ``hold``.
        """
        checked = _checked_keys(keys)
        with tracing.span("kvstore.match_blocks", blocks=len(checked)):
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
        with tracing.span("kvstore.pin_blocks", blocks=len(checked)):
            return Pin(self._port.pin(self._namespace, checked, float(ttl), owner), self._port)

    def get(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> list[bool]:
        """Reads each block into its writable buffer, which must have the block's size.

        False is a miss: the content of that buffer is undefined. No buffer is touched after the return. Raises
        WrongSize, an InvalidRequest, if a block is in the store with another size than its buffer.
        """
        checked = _checked_keys(keys)
        views = _views(checked, buffers, writable=True)
        with tracing.span("kvstore.get_blocks", blocks=len(checked)):
            hits = self._port.get_blocks(self._namespace, checked, views)
        if not all(hits):
            self._check_sizes(checked, views, hits)
        return hits

    def _check_sizes(self, keys: Sequence[bytes], views: Pieces, hits: list[bool]) -> None:
        """Raises WrongSize if a block that was missed is in the store with another size than its buffer."""
        missed = [at for at, hit in enumerate(hits) if not hit]
        sizes = self._port.block_sizes(self._namespace, [keys[at] for at in missed])
        for at, size_bytes in zip(missed, sizes, strict=True):
            if size_bytes not in (0, len(views[at])):
                raise WrongSize(
                    f"buffer {at} has {len(views[at])} bytes, and its block in the store has {size_bytes}: give a "
                    f"buffer of {size_bytes} bytes",
                    hits,
                )

    def supersede(self, keys: Sequence[bytes], *, unused: float = 0.0) -> None:
        """Says that these blocks are the end of an abandoned branch: they go first, until they are used again.

        ``keys`` are in the order of their prompt, without those that other prompts go on from. ``unused`` is how many
        seconds ago you used them last: what anybody used later stays as it is, and so does what lies before it. Deletes
        and protects nothing. Returns before it is done. Raises Unavailable if no worker answers.
        """
        checked, unused_s = _checked_keys(keys), checked_unused_s(unused)
        with tracing.span("kvstore.supersede_blocks", blocks=len(checked)):
            self._port.branches.supersede_blocks(self._namespace, checked, unused_s)

    def plan(
        self,
        prompts: Iterable[Sequence[bytes]],
        *,
        memory_tokens: int,
        decode_tokens: int | Sequence[int | None] | None = None,
    ) -> Plan:
        """Plans a batch, as ``Cache.plan`` does, from the keys of each prompt's full blocks in order.

        A key names its block and all blocks before it, and a block has the layout's chunk_tokens tokens.
        """
        checked = [_checked_keys(keys) for keys in checked_prompts(prompts)]
        with tracing.span("kvstore.plan"):
            size = self._namespace.layout.chunk_tokens
            return make_plan(
                Prompts.of_blocks(checked, size),
                memory_tokens=memory_tokens,
                decode_tokens=decode_tokens,
                chunk_tokens=size,
                storage=KeyStorage(self, checked, size),
            )


class BlockHold:
    """Protected blocks that were in the store when the hold began. Release it, or use it as a context."""

    def __init__(self, hold: PortBlockHold, cache: BlockCache) -> None:
        self._owner = Owner()
        self._hold = hold
        self._cache = cache  # keeps the store open: an unreferenced store closes, which ends its holds
        self._is_released = False

    @property
    def present(self) -> list[bool]:
        """For each key, in the order asked for, whether its block is held."""
        return self._hold.present

    def get(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> list[bool]:
        """Reads held blocks, as ``BlockCache.get`` does.

        Raises HoldBroken if the hold has ended or its worker does not answer.
        """
        self._owner.check()
        checked = _checked_keys(keys)
        views = _views(checked, buffers, writable=True)
        hits = self._hold.read(checked, views)
        if not all(hits):
            self._cache._check_sizes(checked, views, hits)
        return hits

    def release(self) -> None:
        """Ends the hold; idempotent, never raises. Does nothing in a forked child: the hold belongs to its parent."""
        self._is_released = True
        if self._owner.is_here:
            self._hold.release()

    def __repr__(self) -> str:
        return f"<kvstore.BlockHold {sum(self.present)} of {len(self.present)} blocks, {self._cache!r}>"

    def __enter__(self) -> BlockHold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if self._owner.is_here and not self._is_released:
            release_dropped(self, self._hold)


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
