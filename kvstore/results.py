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
    """What clearing a namespace deleted; pinned chunks stay."""

    chunks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PinRecord:
    """A live pin: who holds how many leading tokens of what, and until when (seconds since the epoch)."""

    id: str
    owner: str
    namespace: str
    tokens: int
    expires_s: float


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Where one layer goes: K and V of all tokens read, each contiguous bytes."""

    k: memoryview
    v: memoryview
