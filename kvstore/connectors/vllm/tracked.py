"""One unfinished request of the engine, as the scheduler's half knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstore.connectors.vllm.adapters import Check
from kvstore.connectors.vllm.hinting import NOTHING, Said
from kvstore.connectors.vllm.lookups import Lookup

STALE_S = 5.0
"""A result that the request has not used by then is looked up again."""


@dataclass(slots=True)
class Tracked:
    """Its state from its arrival to its end."""

    request: Any
    said: Said = NOTHING
    lookup: Lookup | None = None
    answered_s: float | None = None
    """Time of the look-up's answer."""
    asked_tokens: int = 0
    """Tokens in the engine's own cache at the last look-up."""
    stored_tokens: int = 0
    """Leading tokens that are stored already, or ordered to be."""
    renewed_s: float = 0.0
    """Time of the last look-up of its blocks from the first on."""
    adapter: Check | None = None
    arrived_s: float = 0.0
    parting: int = 0
    """Tokens that the prompt shares with a stored one, if a hit could not have all: others may share them too."""
    is_parting: bool = False
    """True until the blocks before ``parting`` that the engine has itself were ordered to be stored."""
    loading: bytes = b""
    """The first key of those that it loads now, for others to wait for; empty if it loads nothing."""
    loading_until_s: float = 0.0

    def is_stale(self, now_s: float) -> bool:
        """True if the answer is too old. A look-up without an answer has its own deadline."""
        return self.answered_s is not None and now_s > self.answered_s + STALE_S

    def abandon(self) -> None:
        """Drops the look-up, and spares the threads the rest of it."""
        if self.lookup is not None:
            self.lookup.abandoned = True
        self.lookup = self.answered_s = None
