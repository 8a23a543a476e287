"""A put that memory takes, from where the node writes it to the root: with the calls of a put on the root.

Apart from that, because whoever sends is done, and its memory free, as soon as the bytes were copied.
"""

from __future__ import annotations

from kvstore.address import Chain
from kvstore.errors import Unavailable
from kvstore.hints import Hints
from kvstore.node.node import Node
from kvstore.node.putting import Putting
from kvstore.results import PutResult
from kvstore.sections import Sections


class Absorbing:
    """The chunks from ``first`` on, whose parents are there.

    The first that memory has no room for and those behind it are shed (rule W1): it is full, or owes the root as much
    as it may.  Unless it ``sheds``, or where somebody else is bringing that one, they are put on the root.
    """

    refused = False

    def __init__(self, node: Node, chain: Chain, first: int, hints: Hints, *, sheds: bool = True) -> None:
        """Raises Overloaded where the root has no room for new chunks."""
        node.gc_view.check_room()
        self._node = node
        # What a sweep is taking cannot be put again before it has ended: the rest of the prompt waits for that.
        self._chain = chain.leading(node.gc_view.leading(chain.addresses))
        self._first = first
        self._hints = hints
        self._sheds = sheds
        self._stop = first
        self._is_shed = False
        self._rest: Putting | None = None

    def add_run(self, source: Sections, first: int, count: int, deadline_s: float) -> None:
        """Copies a run, each beginning where the last one ended; nobody needs its memory any more, unless it is put on
        the root: then as ``Putting.add_run``.  Raises what the root raised, or Unavailable.
        """
        stop = min(first + count, len(self._chain))
        if first >= stop or self._is_shed:
            return
        if self._rest is None:
            self._stop += self._node.puts.absorb(self._chain, first, stop - first, source, self._hints)
            if self._stop == stop:
                return
            if (self._sheds and not self._is_taken()) or not self._reaches_root():
                self._is_shed = True
                return
            self._rest = self._node.begin_put(self._chain, self._stop, deadline_s, self._hints)
            if self._rest.refused:
                raise Unavailable("the root does not have the chunks before these yet, and memory is full")
        begin = max(first, self._stop)
        self._rest.add_run(source, begin, stop - begin, deadline_s)

    def finish(self, deadline_s: float) -> PutResult:
        """Waits for what is on its way to the root, and says what was done. Raises what the root raised."""
        layout, taken = self._chain.namespace.layout, self._stop - self._first
        if self._rest is None:
            self._node.puts.found(self._chain, min(self._first, len(self._chain)), self._hints)
            return PutResult(self._stop * layout.chunk_tokens, taken, 0, taken * layout.chunk_bytes)
        rest = self._rest.finish(deadline_s)
        return PutResult(
            rest.tokens_present,
            taken + rest.chunks_written,
            rest.chunks_found,
            taken * layout.chunk_bytes + rest.bytes_written,
        )

    def abandon(self) -> None:
        """Puts nothing more on the root. What memory took stays there. Idempotent."""
        if self._rest is not None:
            self._rest.abandon()

    def _is_taken(self) -> bool:
        memory = self._node.memory
        return memory is not None and memory.is_taken(self._chain, self._stop)

    def _reaches_root(self) -> bool:
        tiers = self._node.tiers
        return tiers is None or tiers.reaches_root(self._hints)
