"""What a cache needs of whoever holds the chunks: a node in this process, or a worker over gRPC.

Two implementations, ``local.py`` and ``remote.py``; everything above behaves the same over either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from kvstore.buffers import Pieces
from kvstore.census.selection import Selection
from kvstore.errors import KVStoreError
from kvstore.hints import Hints
from kvstore.namespace import Namespace
from kvstore.node.moves import Act, Level
from kvstore.progress import Progress
from kvstore.results import Cleared, LayerMemory, PinRecord, PutResult
from kvstore.sections import Sections
from kvstore.tokens import TokenArray
from kvstore.writes import WriteMode

if TYPE_CHECKING:
    from kvstore.client.control import Control


class PortHold(Protocol):
    """Held leading chunks of one prompt."""

    chunks: int

    def read(self, sections: Sections) -> int:
        """Reads the held chunks; returns how many leading ones are good."""
        ...

    def layers(self, memory: Callable[[int], LayerMemory]) -> Iterator[tuple[int, LayerMemory]]:
        """Yields each layer once it is in its memory. Raises HoldBroken where a chunk was lost."""
        ...

    def view(self) -> list[npt.NDArray[Any]]:
        """One read-only array of shape ``(layers, 2, chunk_tokens, kv_heads, head_dim)`` per leading good chunk."""
        ...

    def release(self) -> None:
        """Ends the hold; idempotent, never raises."""
        ...


class PortBlockHold(Protocol):
    """Held engine-hashed blocks."""

    present: list[bool]
    """For each key that was asked for, whether its block was in the store when the hold began."""

    def read(self, keys: Sequence[bytes], buffers: Pieces) -> list[bool]:
        """Reads blocks, some of those held. Raises HoldBroken where the hold has ended."""
        ...

    def release(self) -> None:
        """Ends the hold; idempotent, never raises."""
        ...


class PortMove(Protocol):
    """A prefetch, move or release that goes on."""

    @property
    def chunks(self) -> int:
        """Leading chunks that it is done with."""
        ...

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        ...

    @property
    def error(self) -> KVStoreError | None:
        """What ended it early, if anything did."""
        ...

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits until it is done; returns ``chunks``. Never raises."""
        ...

    def cancel(self) -> None:
        """Has it end soon; idempotent, never waits."""
        ...


class Port(Protocol):
    """Every call returns or raises within its deadline; errors are those of ``kvstore.errors``."""

    @property
    def place(self) -> str:
        """The root or the workers behind this port, and whether it is closed, for people."""
        ...

    def open_namespace(self, namespace: Namespace) -> None:
        """Claims the namespace for its layout. Raises LayoutMismatch."""
        ...

    def namespaces(self) -> list[Namespace]:
        """All namespaces of the store."""
        ...

    def match(self, namespace: Namespace, tokens: TokenArray) -> int:
        """Leading chunks in the store."""
        ...

    def put(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        first: int,
        sections: Sections,
        hints: Hints,
        write: WriteMode | None = None,
    ) -> PutResult:
        """Stores the chunks from index ``first`` on; acknowledged as ``write`` says, or as the node is set."""
        ...

    def get(self, namespace: Namespace, tokens: TokenArray, chunks_max: int, memory: Callable[[int], Sections]) -> int:
        """Matches and reads in one go, at most ``chunks_max`` chunks; returns how many leading ones are good.

        ``memory(count)`` is called once, with the number of chunks matched, and gives where they go.
        """
        ...

    def hold(self, namespace: Namespace, tokens: TokenArray, ttl_s: float | None) -> PortHold:
        """Holds the leading chunks in the store."""
        ...

    def pin(self, namespace: Namespace, tokens: TokenArray, ttl_s: float, owner: str) -> PinRecord:
        """Pins the leading chunks in the store."""
        ...

    def unpin(self, pin_id: str) -> bool:
        """Releases a pin; False where there is none."""
        ...

    def pins(self) -> list[PinRecord]:
        """All live pins."""
        ...

    def refcount(self, namespace: Namespace, tokens: TokenArray) -> int:
        """Live pins that cover all full chunks of ``tokens``."""
        ...

    def put_blocks(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Pieces,
        hints: Hints,
        write: WriteMode | None = None,
    ) -> list[bool]:
        """Stores engine-hashed blocks; acknowledged as ``write`` says, or as the node is set."""
        ...

    def match_blocks(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """Leading keys in the store."""
        ...

    def present_blocks(self, namespace: Namespace, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are in the store."""
        ...

    def hold_blocks(self, namespace: Namespace, keys: Sequence[bytes], ttl_s: float | None) -> PortBlockHold:
        """Holds the blocks that are in the store."""
        ...

    def get_blocks(self, namespace: Namespace, keys: Sequence[bytes], buffers: Pieces) -> list[bool]:
        """Reads engine-hashed blocks."""
        ...

    def move(self, namespace: Namespace, tokens: TokenArray, act: Act, level: Level) -> PortMove:
        """Begins a prefetch, move or release of what is stored of a prompt; returns once it is accepted."""
        ...

    def clear(self, namespace: Namespace) -> Cleared:
        """Deletes the chunks of a namespace."""
        ...

    def stats(self) -> dict[str, int | float]:
        """Counters of the node, or of all workers together."""
        ...

    def clear_selected(self, selection: Selection, progress: Progress, *, dry_run: bool, pinned: bool) -> Cleared:
        """Deletes what a selection names, everywhere. Raises as ``Member.clear_selected`` does."""
        ...

    def control(self) -> Control:
        """Steers the workers behind this port. Raises InvalidRequest where there are none."""
        ...

    def stats_each(self) -> dict[str, dict[str, int | float] | KVStoreError]:
        """Those of each worker by its address, and the error of one that does not answer; "" is a node here."""
        ...

    def close(self) -> None:
        """Releases threads and connections; idempotent."""
        ...
