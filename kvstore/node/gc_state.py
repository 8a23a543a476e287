"""What a node asks of garbage collection: what is being deleted, whether holds protect, and whether there is room.

``node.view`` answers for a cluster, whose sweeps etcd announces, and for a process alone, ``node.host_view`` for a root
that the processes of one host share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.address import Address
from kvstore.errors import Overloaded
from kvstore.keyset import KeySet
from kvstore.root.posix import DiskFull


class Reserved(Protocol):
    """Room for one put."""

    def release(self) -> None:
        """Gives back what was not written of it. Idempotent; from any thread."""
        ...

    def __enter__(self) -> Reserved: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Usage(Protocol):
    """The room that a node takes on the root. Thread-safe."""

    @property
    def written_bytes(self) -> int:
        """Bytes of the files that this node published."""
        ...

    def reserve(
        self, size_bytes: int = 1, missing_bytes: Callable[[], int] | None = None, wait_s: float = ...
    ) -> Reserved:
        """Reserves the room that a put may take, perhaps after a wait of at most ``wait_s``. Raises Overloaded.

        ``missing_bytes`` is called before a wait, and returns how much of the put is not stored already.
        """
        ...

    def wrote(self, size_bytes: int) -> None:
        """Counts a published file."""
        ...

    def removed(self, size_bytes: int) -> None:
        """Counts a deleted file."""
        ...

    def refusal(self, full: DiskFull) -> Overloaded:
        """Notes that a write failed on a full disk; returns the caller's error."""
        ...


class GcState(Protocol):
    """The garbage collection of one root as a node sees it. Thread-safe."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Nothing that is condemned changes under it, in a cluster."""
        ...

    @property
    def usage(self) -> Usage:
        """The room that the node takes."""
        ...

    @property
    def revision(self) -> int:
        """How far it has heard of sweeps: the birth of a hold."""
        ...

    @property
    def protects(self) -> bool:
        """True if holds taken now keep collectors away."""
        ...

    @property
    def is_calm(self) -> bool:
        """True if nothing is condemned."""
        ...

    @property
    def is_full(self) -> bool:
        """True while nothing can be evicted."""
        ...

    @property
    def sweeps(self) -> object:
        """A value that changes whenever a sweep begins or ends, or could do so unseen."""
        ...

    @property
    def listings(self) -> int:
        """How often the root of a host was listed."""
        ...

    def leading(self, wanted: KeySet) -> int:
        """Returns how many leading chunks are not condemned."""
        ...

    def condemns(self, address: Address) -> bool:
        """True if an address counts as absent (rule H1)."""
        ...

    def allowed(self, addresses: Sequence[Address]) -> Sequence[int]:
        """Returns the offsets of those that are not condemned."""
        ...

    def unswept(self, wanted: KeySet) -> npt.NDArray[np.bool_]:
        """Returns which chunks are not condemned."""
        ...

    def stays(self, wanted: KeySet) -> npt.NDArray[np.bool_]:
        """Returns which chunks that a put has just written or found are still there, as far as sweeps go."""
        ...

    def protect(self, packed: bytes) -> Any:
        """Keeps chunks from being evicted on a host until ``unprotect`` of what it returns. Look for them after it."""
        ...

    def unprotect(self, mark: Any) -> None:
        """Ends what ``protect`` returned, once."""
        ...

    def settle(self, wanted: KeySet) -> bool:
        """Waits a moment for chunks that are being deleted on a host; False if they still are."""
        ...

    def check_room(self, size_bytes: int = 0) -> None:
        """Raises Overloaded for a put that will never fit, and while the root is full."""
        ...
