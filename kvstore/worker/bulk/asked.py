"""The chunks that a get over a bulk connection asks for; used by the image stream and by handing over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.address import Chain
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
