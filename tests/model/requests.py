"""A node's work for requests: hold before the look (H1, H2), read under the hold, remember what was seen (H3)."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.config import Config, Dropped
from tests.model.etcd import Step
from tests.model.state import (
    FOUND,
    LOOKING,
    NEVER,
    NO_HOLD,
    NO_LOOK,
    NOT_HELD,
    SEEN,
    SEEN_EARLY,
    TAKEN,
    Hold,
    Node,
    State,
    Violation,
    put,
)


def steps(s: State, i: int, n: Node, k: Config, dropped: Dropped) -> Iterator[Step]:
    """Returns the steps that a serving node may take for each address."""
    for address, tag in enumerate(k.tags):
        if k.holds:
            yield from _hold(s, i, n, address, tag, k, dropped)
        if k.looks:
            yield from _look(s, i, n, address, tag)


def _hold(s: State, i: int, n: Node, address: int, tag: str, k: Config, dropped: Dropped) -> Iterator[Step]:
    hold, inc = n.holds[address], s.files[address]
    # H1: condemned is absent. H2: the hold comes first, in one step with H1; then the look at the file.
    skips = n.seen[address] and "match_ignores_condemned" not in dropped
    # P1: a pin being put keeps its hold, even through a miss.
    may_release = not n.pinning or "pin_no_hold" in dropped
    if hold.stage == NOT_HELD:
        if skips:
            return
        if "stat_before_hold" not in dropped:
            yield f"n{i}.hold{tag}", _with_hold(s, i, n, address, Hold(TAKEN, n.seen_rev, 0))
        elif inc:
            yield f"n{i}.stat{tag}", _with_hold(s, i, n, address, Hold(SEEN_EARLY, NEVER, 0))
        if n.cache[address]:
            if not inc and not s.damaged:
                raise Violation("I1", "a match was answered from memory, the chunk is gone", f"n{i}.match_cached{tag}")
            yield f"n{i}.match_cached{tag}", _with_hold(s, i, n, address, Hold(SEEN, n.seen_rev, inc))
    elif hold.stage == SEEN_EARLY:
        if skips:
            yield f"n{i}.give_up{tag}", _with_hold(s, i, n, address, NO_HOLD)
        elif not inc:
            raise Violation("I1", "a match was answered, the chunk is gone", f"n{i}.hold_late{tag}")
        else:
            yield f"n{i}.hold_late{tag}", _with_hold(s, i, n, address, Hold(SEEN, n.seen_rev, inc))
    elif hold.stage == TAKEN:
        if inc:
            # H3: a chunk seen under a hold may be remembered while the view does not condemn it.
            if k.cache and (not n.seen[address] or "cache_unchecked" in dropped):
                n = n._replace(cache=put(n.cache, address, 1))
            yield f"n{i}.stat{tag}", _with_hold(s, i, n, address, Hold(SEEN, hold.born, inc))
        elif may_release:
            yield f"n{i}.stat_miss{tag}", _with_hold(s, i, n, address, NO_HOLD)
    elif may_release:
        yield f"n{i}.release{tag}", _with_hold(s, i, n, address, NO_HOLD)


def _with_hold(s: State, i: int, n: Node, address: int, hold: Hold) -> State:
    return s._replace(nodes=put(s.nodes, i, n._replace(holds=put(n.holds, address, hold))))


def _look(s: State, i: int, n: Node, address: int, tag: str) -> Iterator[Step]:
    """H3 without a hold: a read, a renewal, a put that lost its race. A look during a condemnation is forgotten."""
    look = n.looks[address]
    if look == NO_LOOK:
        yield f"n{i}.look{tag}", _with_look(s, i, n, address, LOOKING)
    elif look == LOOKING:
        found = FOUND if s.files[address] else NO_LOOK
        yield f"n{i}.look_{'found' if found else 'miss'}{tag}", _with_look(s, i, n, address, found)
    else:
        remembering = n._replace(cache=put(n.cache, address, 1))
        yield f"n{i}.remember{tag}", _with_look(s, i, remembering, address, NO_LOOK)


def _with_look(s: State, i: int, n: Node, address: int, look: int) -> State:
    return s._replace(nodes=put(s.nodes, i, n._replace(looks=put(n.looks, address, look))))
