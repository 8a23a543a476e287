"""The port: the calls that a cache makes to a node in this process, or to workers over gRPC.

It has two implementations, ``local.py`` and ``remote.py``. Everything above behaves alike over both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from kvstore.census.selection import Selection
from kvstore.client.operation import Operation
from kvstore.core.address import TokenArray
from kvstore.core.buffers import BufferMap, Pieces, Planes
from kvstore.core.namespace import Namespace
from kvstore.core.recency import Hints
from kvstore.core.results import Cleared, LayerMemory, PinRecord, PutResult, StoredBlocks
from kvstore.core.validate import TierName
from kvstore.core.write_mode import WriteMode
from kvstore.errors import KVStoreError
from kvstore.format.header import Ancestry


class Protecting(Protocol):
    """A hold of any kind."""

    @property
    def protects(self) -> bool:
        """True while it protects something, as far as this process knows. Takes no lock."""
        ...

    def release(self) -> None:
        """Ends the hold; idempotent, never raises."""
        ...


Prompt = TokenArray | list[bytes]
"""The tokens of a prompt, or the keys of engine-hashed blocks."""


class PortHold(Protecting, Protocol):
    """Held leading chunks of one prompt."""

    chunks: int

    def read(self, sections: BufferMap) -> int:
        """Reads the held chunks; returns the number of leading good ones."""
        ...

    def layers(self, memory: Callable[[int], LayerMemory], band: int) -> Iterator[tuple[int, LayerMemory]]:
        """Yields each layer once it is in its memory. Raises HoldBroken if a chunk was lost.

        At most ``band`` layers are read together, and as many again ahead: a ``band`` of 1 has memory for three.
        """
        ...

    def view(self) -> list[npt.NDArray[Any]]:
        """Returns a read-only array ``(layers, 2, chunk_tokens, kv_heads, head_dim)`` per leading good chunk."""
        ...


class PortBlockHold(Protecting, Protocol):
    """Held engine-hashed blocks."""

    present: list[bool]
    """For each key asked for, whether its block was in the store when the hold began."""

    def read(self, keys: Sequence[bytes], buffers: Pieces) -> list[bool]:
        """Reads some of the held blocks. Raises HoldBroken if the hold has ended."""
        ...


class Transport(Protocol):
    """Calls of a cache. Each returns or raises within its deadline; errors are those of ``kvstore.errors``."""

    shared: dict[Hashable, Any]
    """State that all caches of this store share. It must not refer to the port."""

    @property
    def place(self) -> str:
        """The root or the workers behind this port, and whether it is closed, for people."""
        ...

    def open_namespace(self, namespace: Namespace) -> None:
        """Claims the namespace for its layout. Raises LayoutMismatch."""
        ...

    def namespaces(self) -> list[Namespace]:
        """Returns all namespaces of the store."""
        ...

    def match(self, namespace: Namespace, tokens: TokenArray, *, counts: bool = True) -> int:
        """Returns the number of leading chunks in the store; ``counts`` as in ``Cache.match``."""
        ...

    def match_each(self, namespace: Namespace, prompts: Sequence[TokenArray]) -> list[int]:
        """Returns the number of leading chunks in the store of each prompt (one or more), asked for in one call.

        Fewer answers if the time runs out, or no worker answers. Prompts that begin alike should follow one another.
        """
        ...

    def put(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        first: int,
        sections: Planes,
        hints: Hints,
        write: WriteMode | None = None,
    ) -> PutResult:
        """Stores the chunks from index ``first`` on; ``write`` is the write mode, by default the node's."""
        ...

    def get(self, namespace: Namespace, tokens: TokenArray, chunks_max: int, memory: Callable[[int], BufferMap]) -> int:
        """Matches and reads in one call, at most ``chunks_max`` chunks; returns the number of leading good ones.

        ``memory(count)`` is called once with the number of chunks matched, and returns where they go.
        """
        ...

    def hold(self, namespace: Namespace, tokens: TokenArray, ttl_s: float | None, *, counts: bool = True) -> PortHold:
        """Holds the leading chunks in the store; ``counts`` as in ``Cache.hold``."""
        ...

    def pin(self, namespace: Namespace, prompt: Prompt, ttl_s: float, owner: str) -> PinRecord:
        """Pins the leading chunks of a prompt in the store, or those of the blocks that are there."""
        ...

    def unpin(self, pin_id: str) -> bool:
        """Releases a pin; False if there is none."""
        ...

    def pins(self) -> list[PinRecord]:
        """Returns all live pins."""
        ...

    def refcount(self, namespace: Namespace, tokens: TokenArray) -> int:
        """Returns the number of live pins that cover all full chunks of ``tokens``."""
        ...

    def put_blocks(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Pieces,
        hints: Hints,
        write: WriteMode | None = None,
        ancestry: Ancestry | None = None,
    ) -> StoredBlocks:
        """Stores engine-hashed blocks; ``write`` is the write mode, by default the node's.

        ``ancestry`` says where in their prompt they are; by default its beginning.
        """
        ...

    def match_blocks(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """Returns the number of leading keys in the store."""
        ...

    def present_blocks(self, namespace: Namespace, keys: Sequence[bytes]) -> list[bool]:
        """Returns, for each key, whether it is in the store."""
        ...

    def hold_blocks(self, namespace: Namespace, keys: Sequence[bytes], ttl_s: float | None) -> PortBlockHold:
        """Holds the blocks that are in the store."""
        ...

    def get_blocks(self, namespace: Namespace, keys: Sequence[bytes], buffers: Pieces) -> list[bool]:
        """Reads engine-hashed blocks."""
        ...

    def prefetch(self, namespace: Namespace, tokens: TokenArray, tier: TierName, worker: str | None) -> Operation:
        """Begins to bring the stored part of a prompt to a tier of the worker, by default the one that serves it."""
        ...

    def evict_first(self, namespace: Namespace, tokens: TokenArray) -> None:
        """Makes a prompt the first to go from memory and disk. Does nothing without them."""
        ...

    def operations(self) -> list[Operation]:
        """Returns the operations of this process, or of all workers, newest first."""
        ...

    def clear(self, namespace: Namespace) -> Cleared:
        """Deletes the chunks of a namespace."""
        ...

    def stats(self) -> dict[str, int | float]:
        """Returns the counters of the node, or the sums over all workers."""
        ...

    def clear_selected(self, selection: Selection, *, dry_run: bool, pinned: bool, worker: str | None) -> Operation:
        """Begins to delete selected chunks everywhere. Raises InvalidRequest for a selection of nothing."""
        ...

    def stats_each(self) -> dict[str, dict[str, int | float] | KVStoreError]:
        """Returns the counters of each worker by address, or its error without an answer; "" is a node here."""
        ...

    def close(self) -> None:
        """Releases threads and connections; idempotent."""
        ...
