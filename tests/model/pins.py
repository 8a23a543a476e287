"""Pins: a hold, the put of the ref, its acknowledgement, a look at the file, the release (P1 to P4). Of address A."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.config import Config, Dropped
from tests.model.etcd import Step
from tests.model.state import NOT_HELD, SEEN_EARLY, Node, State, put


def steps(s: State, i: int, n: Node, k: Config, dropped: Dropped) -> Iterator[Step]:
    """Returns the steps that a serving node may take with its pin."""

    def becomes(node: Node) -> State:
        return s._replace(nodes=put(s.nodes, i, node))

    holds = n.holds[0].stage not in (NOT_HELD, SEEN_EARLY)
    unprotected = "pin_no_hold" in dropped and not n.seen[0]
    if not n.ref and not n.pinning and not n.broken and (holds or unprotected):
        yield f"n{i}.pin_begin", becomes(n._replace(pinning=1))
    if n.pinning:
        # P2: the session's key is part of the transaction. Ids differ, so that a late unpin cannot mean the next pin.
        pin = 2 if n.unpinning == 1 else 1
        named = (0,) * k.shards if "pin_drops_named" in dropped else n.named
        yield f"n{i}.pin_put", becomes(n._replace(ref=pin, pinned=s.files[0], pinning=0, named=named, written=1))
    if n.ref and not n.unpinning and not n.pinning and not n.broken:
        unpinned = n._replace(ref=0, pinned=0, written=1)
        yield f"n{i}.unpin", becomes(unpinned)
        if k.late_unpins:  # it was done, its reply was lost, and a copy still travels
            yield f"n{i}.unpin_timeout", becomes(unpinned._replace(unpinning=n.ref))
    if n.unpinning:
        # P3: only with its own id. The node goes on believing in what a blind one takes.
        ref = -n.ref if "unpin_blind" in dropped else n.ref
        yield f"n{i}.late_unpin", becomes(n._replace(ref=ref, unpinning=0))
