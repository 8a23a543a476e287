"""How chunks that arrive at a worker are put: on the root, in memory, or both, as whoever sends them chose.

Apart from the two ways they arrive, which are the same to this.
"""

from __future__ import annotations

from kvstore.address import Chain
from kvstore.hints import Hints
from kvstore.node.node import Node
from kvstore.node.putting import Putting
from kvstore.results import PutResult
from kvstore.sections import Sections
from kvstore.worker.bulk.absorbing import Absorbing
from kvstore.writes import WriteMode


class Keeping:
    """A put on the root that leaves a copy in memory, as far as there is room."""

    def __init__(self, node: Node, chain: Chain, hints: Hints, putting: Putting) -> None:
        self._node = node
        self._chain = chain
        self._hints = hints
        self._putting = putting
        self.refused = putting.refused

    def add_run(self, source: Sections, first: int, count: int, deadline_s: float) -> None:
        """As ``Putting.add_run``."""
        self._putting.add_run(source, first, count, deadline_s)
        # While it is written. Where that fails memory has it all the same: right bytes, which nobody was promised.
        if not self.refused:
            self._node.puts.keep(self._chain, first, count, source, self._hints)

    def finish(self, deadline_s: float) -> PutResult:
        """As ``Putting.finish``."""
        return self._putting.finish(deadline_s)

    def abandon(self) -> None:
        """As ``Putting.abandon``."""
        self._putting.abandon()


Writing = Putting | Absorbing | Keeping


def begin_writing(
    node: Node,
    chain: Chain,
    first: int,
    matched: int,
    hints: Hints,
    write: WriteMode | None,
    deadline_s: float,
    *,
    sheds: bool = True,
) -> Writing:
    """Begins to put the chunks from ``first`` on, of a prompt of which ``matched`` are there.

    What is put behind must begin where the store ends, or it is put on the root; so is what memory has no room for
    unless it ``sheds``. Raises what the root raised.
    """
    mode = node.puts.mode(write, hints)
    if mode is WriteMode.BEHIND and first == matched:
        return Absorbing(node, chain, first, hints, sheds=sheds)
    putting = node.begin_put(chain, first, deadline_s, hints)
    return Keeping(node, chain, hints, putting) if mode is WriteMode.THROUGH else putting
