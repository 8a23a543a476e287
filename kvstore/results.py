"""What calls return: plain values shared by node, worker and client."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PutResult:
    """What a put did. ``tokens_present`` counts leading tokens now in the store, written now or found."""

    tokens_present: int
    chunks_written: int
    chunks_found: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """What clearing deleted, or would have; pinned chunks stay, unless they were asked for."""

    chunks: int
    bytes: int
    pinned: int = 0
    """Chunks that stayed because they are pinned, of a clear by selection."""
    failed: int = 0
    """Chunks, or whole shards, that the root did not let us look at or delete: clear again."""
    unconfirmed: tuple[str, ...] = ()
    """Sessions of nodes that live and did not say in time that their memory has none of it any more; of a selection
    that a worker cleared an empty text for each: its ticket says whose they are.
    """


@dataclass(frozen=True, slots=True)
class PinRecord:
    """A live pin: who holds how many leading tokens of what, and until when (seconds since the epoch)."""

    id: str
    owner: str
    namespace: str
    tokens: int
    expires_s: float
    tenant: str = "*"
    """Of the namespace; ``*`` where that is not known any more. Not sent to clients."""


@dataclass(frozen=True, slots=True)
class LimitValue:
    """A limit of a worker that can change while it runs."""

    name: str
    value: str
    meaning: str
    """What it bounds."""
    started: str
    """What the worker was started with."""
    before: str = ""
    """What it was before it was changed just now; empty where it was not."""


@dataclass(frozen=True, slots=True)
class Draining:
    """What a worker still has to do that was told to stop."""

    calls: int
    """In progress."""
    behind_bytes: int
    """That only its memory has, and that it writes to the root."""
    tickets: int
    """That are cancelled."""
    within_s: float
    """How long it waits for calls."""


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Where one layer goes: K and V of all tokens read, each contiguous bytes."""

    k: memoryview
    v: memoryview
