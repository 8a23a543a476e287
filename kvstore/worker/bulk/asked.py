"""The chunks that a get over a bulk connection asks for; used by the image stream and by handing over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.node.holds import Hold
from kvstore.node.node import Node
from kvstore.node.wanted import Wanted


@dataclass(frozen=True, slots=True)
class Asked:
    """The wanted chunks or engine-hashed blocks, and the hold to read them under, if any."""

    wanted: Wanted
    hold: Hold | None = None
    memory_only: bool = False
    """The client is a peer: give only what memory has (rule P2)."""

    def allowed(self, node: Node, indexes: range) -> Sequence[int]:
        """Returns the indexes that may be given: all under a hold, else those not condemned. Raises HoldBroken."""
        if self.hold is None:
            return node.handing.allowed(self.wanted, indexes)
        node.holds.check(self.hold)
        return indexes
