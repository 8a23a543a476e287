"""Nodes: sessions and views (V1 to V3, A1 to A3, C4), then their work for requests (H1 to H3) and pins (P1 to P4)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from tests.model.configs import Config, Dropped
from tests.model.etcd import Step, listed
from tests.model.state import (
    BEFORE_ALL,
    DEAD,
    FENCING,
    FOUND,
    JOINING,
    KEY_CHAIN,
    LIVE,
    LOOKING,
    NEVER,
    NO_HOLD,
    NO_LOOK,
    NO_ROLLBACK,
    NOT_HELD,
    OUT,
    SEEN,
    SEEN_EARLY,
    TAKEN,
    UP,
    Event,
    Hold,
    Node,
    State,
    Violation,
    address_of,
    put,
)
from tests.model.world import dead_node


def steps(s: State, k: Config, dropped: Dropped) -> Iterator[Step]:
    """Returns the possible next steps of each node."""
    for i, n in enumerate(s.nodes):
        if i and n == s.nodes[i - 1] and s.snapshot == NO_ROLLBACK:
            continue  # it can do nothing that the one before it cannot
        if n.status == OUT or n.status == JOINING:
            yield from _join(s, i, n, k, dropped)
        elif n.status == FENCING:
            yield from _lift_unnamed(s, i, n)
        if n.status in LIVE and not ("view_before_session" in dropped and n.status == JOINING):
            yield f"n{i}.lease_dies", with_node(s, i, _dead(n, k, dropped))
        if n.status == DEAD:
            yield from _after_death(s, i, n, dropped)
        elif n.status == UP:
            yield from _serve(s, i, n, k, dropped)


def with_node(s: State, i: int, n: Node) -> State:
    """A copy of the state with another node ``i``."""
    return s._replace(nodes=put(s.nodes, i, n))


def _join(s: State, i: int, n: Node, k: Config, dropped: Dropped) -> Iterator[Step]:
    """V1: the session's key first, then ``gc/``, then the start fence, then requests."""
    view = n._replace(seen_rev=s.rev, seen=listed(s.condemned))
    if "view_before_session" in dropped:
        yield from _join_backwards(s, i, n, view)
    elif n.status == OUT:
        yield f"n{i}.session_put", with_node(s, i, n._replace(status=JOINING))
    else:
        fences = k.rollback and "no_start_fence" not in dropped
        yield f"n{i}.list", with_node(s, i, view._replace(status=FENCING if fences else UP))


def _join_backwards(s: State, i: int, n: Node, view: Node) -> Iterator[Step]:
    if n.status == OUT:
        yield f"n{i}.list", with_node(s, i, view._replace(status=JOINING))
        return
    # What happened between list and session is not lost, only late.
    missed = n.seen_rev != s.rev
    joined = with_node(s, i, n._replace(status=UP, lag=1 if missed else 0, announced=n.seen_rev))
    yield f"n{i}.session_put", joined._replace(log=s.log or (Event(s.rev, listed(s.condemned)),)) if missed else joined


def _lift_unnamed(s: State, i: int, n: Node) -> Iterator[Step]:
    """C4: folders that no key names belong to sweeps that etcd has forgotten; their files go back (F3)."""
    named = {key.sweep for key in s.condemned if key is not None}
    unnamed = [sweep for sweep in s.folders if sweep not in named]
    for sweep in unnamed:
        entries = [entry for entry in s.trash if entry.sweep == sweep]
        for entry in entries:
            address = address_of(entry.inc)
            files = s.files if s.files[address] else put(s.files, address, entry.inc)
            yield f"n{i}.fence_restore", s._replace(files=files, trash=s.trash - {entry})
        if not entries:
            yield f"n{i}.fence_rmdir(s{sweep})", s._replace(folders=s.folders - {sweep})
    if not unnamed:
        yield f"n{i}.serve", with_node(s, i, n._replace(status=UP))


def _dead(n: Node, k: Config, dropped: Dropped) -> Node:
    if k.persistent_pins:
        pinning = n.pinning if "pin_no_session" in dropped else 0
        return dead_node(k)._replace(ref=n.ref, pinned=n.pinned, pinning=pinning)
    if "rejoin_keeps_holds" in dropped:
        return dead_node(k)._replace(seen_rev=n.seen_rev, seen=n.seen, holds=n.holds)
    return dead_node(k)


def _after_death(s: State, i: int, n: Node, dropped: Dropped) -> Iterator[Step]:
    if "rejoin_keeps_holds" in dropped and any(hold.stage for hold in n.holds):
        again = n._replace(status=UP, seen_rev=s.rev, seen=listed(s.condemned), announced=s.rev)
        yield f"n{i}.session_again", with_node(s, i, again)
    if n.pinning:
        yield f"n{i}.zombie_pin_put", with_node(s, i, n._replace(ref=1, pinned=s.files[0], pinning=0))


def _serve(s: State, i: int, n: Node, k: Config, dropped: Dropped) -> Iterator[Step]:
    if n.broken and "no_chain" not in dropped:
        # It may notice at any time, and until then serves on. A broken chain of sweeps also keeps the watch silent.
        yield f"n{i}.chain_broken", with_node(s, i, dead_node(k))
    elif n.broken:
        n = n._replace(broken=0)
    if n.lag and not n.broken:
        yield from _apply_event(s, i, n, k, dropped)
    if k.lost_watch:
        yield from _lose_watch(s, i, n, k, dropped)
    if not n.broken:
        yield from _announce(s, i, n, dropped)
    yield from request_steps(s, i, n, k, dropped)
    if k.pins:
        yield from pin_steps(s, i, n, k, dropped)


def _apply_event(s: State, i: int, n: Node, k: Config, dropped: Dropped) -> Iterator[Step]:
    """One revision of the watch, whole (A1)."""
    event = s.log[len(s.log) - n.lag]
    yield f"n{i}.watch_event", with_node(s, i, _applied(n, event, k, dropped)._replace(lag=n.lag - 1))
    if "half_event" in dropped and event.condemned[1:] != n.seen[1:]:
        half = Event(event.rev, event.condemned[:1] + n.seen[1:])
        yield f"n{i}.half_event", with_node(s, i, _applied(n, half, k, dropped))


def _applied(n: Node, event: Event, k: Config, dropped: Dropped) -> Node:
    """H3: what is condemned is forgotten.

    Where any look may be remembered, so is what a sweep that closes had condemned, and looks in progress with it: one
    that began while the sweep was in flight may have seen what the sweep then took.
    """
    before, now = n.seen, event.condemned
    n = n._replace(seen_rev=event.rev, seen=now)
    if k.looks:
        changed = now if "forgets_condemned_only" in dropped else [a != b for a, b in zip(before, now, strict=True)]
        cache = tuple([0 if gone else known for gone, known in zip(changed, n.cache, strict=True)])
        looks = tuple([NO_LOOK if gone else look for gone, look in zip(changed, n.looks, strict=True)])
        return n._replace(cache=cache, looks=n.looks if "look_outlives_event" in dropped else looks)
    if any(now) and 1 in n.cache and "cache_not_evicted" not in dropped:
        return n._replace(cache=tuple([0 if gone else known for gone, known in zip(now, n.cache, strict=True)]))
    return n


def _lose_watch(s: State, i: int, n: Node, k: Config, dropped: Dropped) -> Iterator[Step]:
    """V3: reads ``gc/`` afresh, and with it its own session's key: a restored etcd compacts every watch (C2)."""
    if n.broken & KEY_CHAIN and "lost_watch_no_key_check" not in dropped:
        yield f"n{i}.lost_watch_and_session", with_node(s, i, dead_node(k))
        return
    aged = [hold._replace(born=BEFORE_ALL) if hold.stage else hold for hold in n.holds]
    fresh = n._replace(
        seen_rev=s.rev,
        seen=listed(s.condemned),
        lag=0,
        holds=n.holds if "lost_watch_keeps_births" in dropped else tuple(aged),
        cache=n.cache if "lost_watch_keeps_cache" in dropped else (0,) * k.shards,
        looks=n.looks if "lost_watch_keeps_looks" in dropped else (NO_LOOK,) * k.shards,
        broken=n.broken & KEY_CHAIN,
    )
    if fresh != n:
        yield f"n{i}.lost_watch", with_node(s, i, fresh)


def _announce(s: State, i: int, n: Node, dropped: Dropped) -> Iterator[Step]:
    """A1, A2: a revision that was applied, with the names of what older holds have of the sweeps up to it.

    Which holds know their chunks is open: the announcement stops at the birth of those that do not. A hold that was
    born at a revision may live when that is announced: what it condemned was not held (H1).
    A3 is looser here than in truth: a view that lags may announce too, only a broken chain keeps it from that.
    """
    newest = s.rev if "announce_unseen" in dropped else n.seen_rev
    held = [a for a, hold in enumerate(n.holds) if hold.stage and hold.stage != SEEN_EARLY]
    made = set[tuple[int, tuple[int, ...]]]()
    for size in range(len(held) + 1):
        for unknown in combinations(held, size):
            if "holds_unnamed" in dropped and size < len(held):
                continue
            announced = min(newest, _birth(n, unknown, dropped))
            older = {a for a in held if a not in unknown and n.holds[a].born < n.seen[a] <= announced}
            made.add((announced, tuple([int(a in older) for a in range(len(n.holds))])))
    if "announce_while_holding" in dropped:
        made = {(newest, n.named)}
    for announced, named in sorted(made):
        if n.announced < announced:
            due = any(key is not None and n.announced < key.stamp <= announced for key in s.condemned)
            # One that frees no sweep is made by no node; it is allowed here, and does not count for liveness.
            yield (
                f"n{i}.announce" if due else f"n{i}.early_announce",
                with_node(s, i, n._replace(announced=announced, named=named, written=1)),
            )


def _birth(n: Node, unknown: tuple[int, ...], dropped: Dropped) -> int:
    """The birth of the oldest of some holds."""
    births = [n.holds[a].born for a in unknown]
    if "announce_youngest" in dropped and births:
        births = [max(births)]
    return min(births, default=NEVER) + (1 if "announce_past_birth" in dropped else 0)


def request_steps(s: State, i: int, n: Node, k: Config, dropped: Dropped) -> Iterator[Step]:
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


def pin_steps(s: State, i: int, n: Node, k: Config, dropped: Dropped) -> Iterator[Step]:
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
