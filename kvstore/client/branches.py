"""The part of the port that says which stored branches were abandoned, for its two implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.namespace import Namespace
from kvstore.tokens import TokenArray


class PortBranches(Protocol):
    """Says which stored branches were abandoned. Each call returns before it is done, and does nothing twice."""

    def supersede(self, namespace: Namespace, tokens: TokenArray, first: int, unused_s: float) -> None:
        """Supersedes the chunks of a prompt from index ``first`` on, which was used last ``unused_s`` ago."""
        ...

    def supersede_blocks(self, namespace: Namespace, keys: Sequence[bytes], unused_s: float) -> None:
        """Supersedes engine-hashed blocks, in the order of their prompt."""
        ...
