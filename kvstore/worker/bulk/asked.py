"""What a get over a bulk connection asks for: the same to whoever streams it and to whoever hands it over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.node.wanted import Wanted


def _is_held() -> None:
    """Nobody holds blocks for a client."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The chunks of a prompt under a hold, or engine-hashed blocks."""

    wanted: Wanted
    check: Callable[[], None] = _is_held
    """Raises HoldBroken if the hold has ended."""
    memory_only: bool = False
    """Nothing is given but what memory has: the client is a peer (rule P2)."""
