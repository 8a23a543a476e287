"""A world at its beginning, its canonical form, and the invariants on states (I1 and I2)."""

from __future__ import annotations

from tests.model.configs import Config
from tests.model.state import (
    DEAD,
    FENCING,
    INCS_PER_ADDRESS,
    NO_HOLD,
    NO_LOOK,
    NO_ROLLBACK,
    NOT_TAKEN,
    OUT,
    SEEN,
    UP,
    Condemned,
    Mender,
    Node,
    Run,
    State,
    address_of,
)

NEW = 0  # what a run and a mender begin as


def blank_node(k: Config, status: int) -> Node:
    """A node that knows nothing."""
    none = (0,) * k.shards
    return Node(status, 0, none, 0, (NO_HOLD,) * k.shards, none, (NO_LOOK,) * k.shards, 0, none, 0, 0, 0, 0, 0, 0)


def dead_node(k: Config) -> Node:
    """A session that is over (V2): it holds, remembers and pins nothing."""
    return blank_node(k, DEAD)


def initial(k: Config) -> State:
    """Every address is published once; nobody is there yet."""
    first = tuple(INCS_PER_ADDRESS * address + 1 for address in k.addresses)
    none: frozenset[int] = frozenset()
    return State(
        files=first,
        next_inc=tuple(inc + 1 for inc in first),
        trash=frozenset(),
        folders=none,
        damaged=none,
        quarantine=frozenset(),
        condemned=(None,) * k.shards,
        rev=0,
        log=(),
        snapshot=NOT_TAKEN if k.rollback else NO_ROLLBACK,
        nodes=(blank_node(k, OUT),) * k.nodes,
        runs=(Run(NEW, (), 0, ()),) * k.runs,
        menders=(Mender(NEW, None),) * (k.menders + k.restorers),
        sweeps_count=0,
    )


def canonical(s: State) -> State:
    """The canonical form of a world: without the order of nodes, events that all have applied, and names of no sweep.

    What a session names counts only for a sweep that it has announced: for the next one it must announce again.
    """
    nodes = s.nodes
    for i, n in enumerate(nodes):
        if 1 in n.named:
            named = tuple([int(_counts(s.condemned[a], n.announced)) if one else 0 for a, one in enumerate(n.named)])
            n = n._replace(named=named)
            nodes = (*nodes[:i], n, *nodes[i + 1 :])
        if n.ref and not n.pinned and s.files[0]:
            nodes = (*nodes[:i], n._replace(pinned=s.files[0]), *nodes[i + 1 :])
    if len(nodes) > 1 and s.snapshot == NO_ROLLBACK:  # a snapshot names them by their place
        nodes = tuple(sorted(nodes))
    log = s.log
    if log:
        lag = max([n.lag for n in nodes if n.status == UP or n.status == FENCING], default=0)
        log = log[len(log) - lag :] if lag else ()
    if nodes == s.nodes and len(log) == len(s.log):
        return s
    return s._replace(nodes=nodes, log=log)


def _counts(key: Condemned | None, announced: int) -> bool:
    return key is not None and key.stamp <= announced


def broken_invariant(s: State, k: Config) -> tuple[str, str] | None:
    """The invariant (I1 or I2) that does not hold in this state, and why."""
    for n in s.nodes:
        if n.status == UP:
            for address, hold in enumerate(n.holds):
                if hold.stage == SEEN and not _is_kept(s, k, address, hold.inc):
                    return "I1", "a held chunk is not readable"
        counts = n.ref and n.pinned and (n.status == UP or (n.status == DEAD and k.persistent_pins))
        if counts and not _is_kept(s, k, 0, n.pinned):
            return "I2", "a pinned chunk is not readable"
    return None


def _is_kept(s: State, k: Config, address: int, inc: int) -> bool:
    """True if what is protected is where it must be.

    Strictly: this incarnation, at its name.  Once a file was damaged the promise is a weaker one: a whole publication
    is at the name, or in quarantine, from where a collector's next round puts it back.
    """
    if s.files[address] == inc:
        return True
    if k.replaces:
        return s.files[address] != 0
    if not s.damaged:
        return False
    return inc in s.damaged or any_whole(s)


def any_whole(s: State) -> bool:
    """True if a publication that can be read is at its name or in quarantine. For one address."""
    at_name = s.files[0] != 0 and s.files[0] not in s.damaged
    return at_name or any(entry.inc not in s.damaged for entry in s.quarantine)


def any_left(s: State, inc: int, condemned: int = 0) -> bool:
    """True if anything is left of an address when ``inc`` goes: a whole publication, or one that is newer.

    What a sweep has condemned does not count.
    """
    address = address_of(inc)
    left = [s.files[address], *[entry.inc for entry in s.trash], *[entry.inc for entry in s.quarantine]]
    return any(
        one not in (0, condemned) and address_of(one) == address and (one not in s.damaged or one > inc) for one in left
    )
