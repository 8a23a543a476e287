"""Pin twins as a node writes them: on lanes, because a mount may hang, and with the node's ids and clock."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.errors import RootMismatch
from kvstore.meta.keys import PinId
from kvstore.meta.pins import PinRecord
from kvstore.node.node import Node
from kvstore.root.fences import list_twins, read_twin, remove_twin, write_twin


class NodeTwins:
    """See ``meta.pins.Twins``."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def write(self, owner: str, pin: PinId, content: bytes) -> None:
        """See ``meta.pins.Twins``."""
        node = self._node
        node.on_root(lambda: write_twin(node.root, owner, pin, content, ids=node.ids, clock=node.clock))

    def remove(self, owner: str, pin: PinId) -> bool:
        """See ``meta.pins.Twins``."""
        return self._node.on_root(lambda: remove_twin(self._node.root, owner, pin))

    def unexpired(self) -> list[PinRecord]:
        """Returns the twins of pins that have not ended. Raises RootMismatch if one cannot be understood."""
        now_s = self._node.clock.now_s()
        return [record for record in self._node.on_root(lambda: list(self._records())) if record.expires_s > now_s]

    def _records(self) -> Iterator[PinRecord]:
        for name in list_twins(self._node.root):
            content = read_twin(self._node.root, name)
            if content is not None:
                try:
                    yield PinRecord.from_bytes(content, name)
                except RootMismatch as mismatch:
                    raise RootMismatch(f"{mismatch} Nobody knows what it protects (gc/RUNBOOK.md)") from mismatch
