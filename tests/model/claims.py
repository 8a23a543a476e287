"""Claims on a root of one host (rule S6), in a world of their own: every interleaving of nodes, claims and collectors.

Apart from the other worlds, because no chunk and no sweep matters here: the world is one sum of bytes, and who knows of
it. I6: while there is a level, the files take no more than it, but for what nodes that live owe, and what nodes that
died owed. So no claim lets the root exceed its bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

PUT, CLAIM, STEP, LENT = 2, 4, 2, 3
"""Bytes of a put, of a claim, of what a node writes before its report is heard (X), of what it may write unseen."""
MINE_MAX = CLAIM + PUT
LIMIT = 8
"""Claims and collectors stop here."""
USED_MAX = 12
NODES, LIVES_MAX = 2, 2

LENDING, HANDING_OVER = "lending", "handing over"
"""The two worlds: one where nodes lose the metadata, thrice at most, and one with a collector that comes and goes."""
DROPPED = {
    "claims_too_little": LENDING,
    "lends_free": LENDING,
    "settles_what_was_lent": LENDING,
    "settles_no_debt": LENDING,
    "claims_blind": LENDING,
    "begins_unknown": HANDING_OVER,
    "begins_beside_a_word": HANDING_OVER,
    "word_keeps_level": HANDING_OVER,
    "leaves_no_margin": HANDING_OVER,
    "leaves_unreported": HANDING_OVER,
    "leaves_to_others": HANDING_OVER,
    "settles_with_any_level": HANDING_OVER,
}
"""Parts of S6, and a world in which I6 does not hold without them."""

NO_COLLECTOR, LISTED, COUNTING, LEAVING = range(4)
NO_READ, READ, STALE = range(3)
NO_LEVEL = -1


class Node(NamedTuple):
    """One node, or one session of a process; ``is_up`` is false before the first and after the last."""

    is_up: bool
    left: int = 0  # claimed and not written
    owed: int = 0  # lent without a claim
    mine: int = 0  # claimed from the level that is there; enough is MINE_MAX
    has_claimed: bool = False
    knows: bool = True  # the metadata can be relied on
    read: int = NO_READ  # a transaction to claim is under way
    level_read: int = NO_LEVEL
    empty_read: bool = False
    is_bound: bool = False  # by a collector's word
    may: bool = False  # the word says that there is room
    stale: int = 0  # was left of a claim when a word ended claims: it writes that until it hears of it
    spent: int = 0  # of what the word allows
    fresh: int = 0  # written since the last listing or report


class World(NamedTuple):
    """``counted`` is the collector's level, ``gone`` the nodes that ended since it listed, ``lost`` what they owed."""

    nodes: tuple[Node, ...]
    used: int = 0
    level: int | None = None
    collector: int = NO_COLLECTOR
    counted: int = 0
    unreported: int = 0  # what the level that its word ended has beyond what it had counted
    gone: int = 0
    lost: int = 0
    killed: bool = False  # a collector was, and nodes still write what its word allows: uncounted
    lives: int = 0
    runs: int = 0  # collectors that may still begin
    losses: int = 0  # of the metadata, that may still happen


Step = tuple[str, World]


@dataclass(frozen=True, slots=True)
class Claimed:
    """The result of a search: a shortest way to where I6 does not hold, empty if it holds."""

    states_count: int
    trace: tuple[str, ...]


def search(world: str, dropped: str = "") -> Claimed:
    """Searches all of a world; ``dropped`` is the part of S6 that is left out."""
    events = (0, 3) if world == LENDING else (1, 0)
    first = World((Node(is_up=False),) * NODES, runs=events[0], losses=events[1])
    before: dict[World, tuple[World, str] | None] = {first: None}
    queue = deque([first])
    while queue:
        w = queue.popleft()
        for label, after in steps(w, dropped):
            after = after._replace(nodes=tuple(sorted(after.nodes)))
            if after in before:
                continue
            before[after] = (w, label)
            if is_exceeded(after):
                return Claimed(len(before), _trace(before, after))
            queue.append(after)
    return Claimed(len(before), ())


def is_exceeded(w: World) -> bool:
    """True if I6 does not hold."""
    if w.level is None:
        return False
    return w.used > w.level + sum(_uncounted(w, n) for n in w.nodes) + w.lost


def steps(w: World, dropped: str) -> Iterator[Step]:
    """Whatever may happen next, to whomever."""
    yield from _collector(w, dropped)
    for i, n in enumerate(w.nodes):
        if not n.is_up:
            if w.lives < LIVES_MAX:
                begun = Node(is_up=True, is_bound=w.collector == COUNTING)  # the word has not counted it
                yield f"n{i}.begin", _with(w, i, begun)._replace(lives=w.lives + 1)
            continue
        yield from _claiming(w, i, n, dropped)
        yield from _writing(w, i, n)
        yield f"n{i}.die", _gone(w, i, n, lost=_uncounted(w, n))
        yield f"n{i}.end", _ended(w, i, n, dropped)
        if n.knows and w.losses:
            lost = n._replace(knows=False, read=NO_READ, level_read=NO_LEVEL, empty_read=False)
            yield f"n{i}.lose_metadata", _with(w, i, lost)._replace(losses=w.losses - 1)
        elif not n.knows:
            yield f"n{i}.find_metadata", _with(w, i, n._replace(knows=True))


def _claiming(w: World, i: int, n: Node, dropped: str) -> Iterator[Step]:
    if n.is_bound or n.left >= PUT:
        return
    if not n.knows:
        if n.has_claimed and not n.owed:
            owed = 0 if dropped == "lends_free" else LENT
            yield f"n{i}.lend", _with(w, i, n._replace(left=n.left + LENT, owed=owed))
        return
    if n.read == NO_READ:
        yield (
            f"n{i}.read",
            _with(
                w, i, n._replace(read=READ, level_read=NO_LEVEL if w.level is None else w.level, empty_read=w.used == 0)
            ),
        )
        return
    done = n._replace(read=NO_READ, level_read=NO_LEVEL, empty_read=False)
    knows_level = n.level_read != NO_LEVEL or n.empty_read or dropped == "begins_unknown"
    if n.level_read == NO_LEVEL and w.collector == COUNTING and dropped != "begins_beside_a_word":
        knows_level = False
    lacking = 0 if dropped == "claims_too_little" else PUT - n.left
    after = max(0, n.level_read) + CLAIM + lacking + n.owed
    if (n.read == STALE and dropped != "claims_blind") or not knows_level or after > LIMIT:
        yield f"n{i}.refused", _with(w, i, done)
        return
    mine = min(MINE_MAX, n.mine + CLAIM + lacking)
    claimed = done._replace(left=CLAIM + PUT, owed=0, mine=mine, has_claimed=True)
    yield f"n{i}.claim({after})", _with(_level(w, after, is_new=w.level is None), i, claimed)


def _writing(w: World, i: int, n: Node) -> Iterator[Step]:
    allowed = n.may and n.spent + PUT <= STEP if n.is_bound else n.left >= PUT
    if allowed and w.used < USED_MAX:
        left = max(0, n.left - PUT)
        wrote = n._replace(left=left, spent=n.spent + PUT * n.is_bound, fresh=n.fresh + PUT)
        yield f"n{i}.put", _with(w, i, wrote)._replace(used=w.used + PUT)
    if w.collector == COUNTING and n.knows and (not n.is_bound or n.fresh):
        counted = w.counted + n.fresh
        heard = n._replace(
            is_bound=True,
            may=counted < LIMIT,
            stale=0,
            spent=0,
            fresh=0,
            read=NO_READ,
            level_read=NO_LEVEL,
            empty_read=False,
            left=0,
            owed=0,
        )
        yield f"n{i}.hear+report({n.fresh})", _with(w, i, heard)._replace(counted=counted)
    if w.collector in (NO_COLLECTOR, LISTED) and n.is_bound:
        lapsed = _with(w, i, n._replace(is_bound=False, may=False, left=0, spent=0))
        yield f"n{i}.lapse", lapsed._replace(lost=w.lost + _uncounted(w, n))


def _collector(w: World, dropped: str) -> Iterator[Step]:
    if w.collector == NO_COLLECTOR:
        if w.runs:
            lost = w.lost + sum(_uncounted(w, n) for n in w.nodes if n.is_bound)
            listed = w._replace(nodes=tuple(n._replace(fresh=0) for n in w.nodes), lost=lost, gone=0)
            yield "c.list", listed._replace(collector=LISTED, counted=w.used, runs=w.runs - 1)
        return
    yield "c.die", _unread(w)._replace(collector=NO_COLLECTOR, killed=w.killed or w.collector != LISTED)
    if w.collector == LISTED:
        told = w if dropped == "word_keeps_level" else _level(w, None, is_new=True)
        nodes = tuple(n._replace(stale=n.stale + max(0, n.left) * (not n.is_bound)) for n in told.nodes)
        told = told._replace(nodes=nodes)
        yield (
            "c.word",
            told._replace(collector=COUNTING, killed=False, lost=0, unreported=max(0, (w.level or 0) - w.counted)),
        )
    elif w.collector == COUNTING:
        if w.used >= PUT and w.counted >= LIMIT:
            yield "c.reap", w._replace(used=w.used - PUT, counted=w.counted - PUT)
        yield "c.take_back", _unread(w)._replace(collector=LEAVING)
    else:
        margin = 0 if dropped == "leaves_no_margin" else (NODES + w.gone) * STEP
        found = 0 if w.level is None else w.level
        known = w.counted + (0 if dropped == "leaves_unreported" else w.unreported)
        left = _level(w, known + margin + found, is_new=w.level is None)
        if w.level is not None and dropped == "leaves_to_others":
            left = w
        yield "c.leave", left._replace(collector=NO_COLLECTOR)


def _ended(w: World, i: int, n: Node, dropped: str) -> World:
    """A node that ends gives back what it claimed and did not write, and counts what it was lent."""
    if n.is_bound or not n.knows or w.level is None or not (n.mine or dropped == "settles_with_any_level"):
        return _gone(w, i, n, lost=_uncounted(w, n))
    back = n.left - (0 if dropped == "settles_what_was_lent" else n.owed)
    back = back if dropped == "settles_with_any_level" else min(back, n.mine)
    if dropped == "settles_no_debt":
        back = max(0, back)
    return _gone(_level(w, max(0, w.level - back), is_new=False), i, n, lost=n.stale if n.mine else 0)


def _uncounted(w: World, n: Node) -> int:
    """Bytes that a node wrote, and that nobody will count before the next listing."""
    if n.is_bound:
        return n.fresh if w.killed or w.collector == LEAVING else 0
    stale = n.stale - max(0, n.left) if not n.mine and n.stale else n.stale
    return n.owed + stale


def _gone(w: World, i: int, n: Node, lost: int) -> World:
    return _with(w, i, Node(is_up=False))._replace(gone=w.gone + 1, lost=w.lost + lost)


def _level(w: World, level: int | None, *, is_new: bool) -> World:
    """Puts the level. Transactions that read another one fail; claims from a level key that is gone are gone too."""
    w = _unread(w)
    return w._replace(level=level, nodes=tuple(n._replace(mine=0) for n in w.nodes) if is_new else w.nodes)


def _unread(w: World) -> World:
    """Reads before this are out of date. That holds for a collector's end: no claim takes as long as its life."""
    return w._replace(nodes=tuple(n._replace(read=STALE if n.read == READ else n.read) for n in w.nodes))


def _with(w: World, i: int, node: Node) -> World:
    return w._replace(nodes=(*w.nodes[:i], node, *w.nodes[i + 1 :]))


def _trace(before: dict[World, tuple[World, str] | None], w: World) -> tuple[str, ...]:
    labels: list[str] = []
    while (found := before[w]) is not None:
        w, label = found
        labels.append(label)
    return tuple(labels[::-1])
