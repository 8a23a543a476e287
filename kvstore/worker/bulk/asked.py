"""What a get over a bulk connection asks for: the same to the stream of images and to what hands them over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.address import Chain
from kvstore.node.holds import Hold
from kvstore.node.node import Node
from kvstore.node.wanted import Wanted


@dataclass(frozen=True, slots=True)
class Asked:
    """The chunks of a prompt, or engine-hashed blocks, and the hold that they are read under, if any."""

    wanted: Wanted
    hold: Hold | None = None
    memory_only: bool = False
    """Nothing is given but what memory has: the client is a peer (rule P2)."""

    def allowed(self, node: Node, indexes: range) -> Sequence[int]:
        """Return the indexes that may be given: all under a hold or of a prompt, else those not condemned.

        Raises HoldBroken.
        """
        if self.hold is not None:
            node.holds.check(self.hold)
        elif not isinstance(self.wanted, Chain):
            allowed = node.gc_view.allowed(self.wanted.addresses[indexes.start : indexes.stop])
            if len(allowed) < len(indexes):
                return [indexes[at] for at in allowed]
        return indexes
