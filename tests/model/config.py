"""The size of a world and its possible events: the bounds of one exhaustive search."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

Dropped = frozenset[str]
"""The rules that a mutation leaves out, or breaks."""


@dataclass(frozen=True, slots=True)
class Config:
    """The bounds of a world. The first line counts things; each flag below allows one kind of event."""

    nodes: int = 2
    runs: int = 2
    sweeps: int = 2
    incs: int = 2
    """Publications of each address, the first included."""
    shards: int = 1
    menders: int = 0
    """The number of those that may set a damaged file aside; one file is damaged once."""
    restorers: int = 0
    """The number of collectors that may put whole ones back in their rounds."""

    holds: bool = True
    cache: bool = False
    """Remembers what it saw under a hold."""
    looks: bool = False
    """Remembers what it saw by any look, with a hold or without."""
    pins: bool = False
    late_unpins: bool = False
    persistent_pins: bool = False
    """Pins that outlive their session."""
    other_shard: bool = False
    """A sweep of a shard of which no address is modelled, on the same chain."""
    rollback: bool = False
    """etcd comes back older than the root, once (C13)."""
    lost_watch: bool = False
    abandoning: bool = False
    final_list: bool = False
    """A transaction fixes the list before anything is deleted (O1)."""
    objects: bool = False
    """An object store: conditional deletes, no folders."""
    replaces: bool = False
    """A root without link(2): publishing replaces. Then only "some publication is there" can hold, and not I3."""

    def __post_init__(self) -> None:
        assert self.shards == 1 or not (self.pins or self.final_list or self.menders)
        assert not (self.menders and (self.cache or self.looks or self.rollback))

    @property
    def addresses(self) -> range:
        """One per shard."""
        return range(self.shards)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of shards that one collector may sweep together."""
        return tuple(group for size in range(1, self.shards + 1) for group in combinations(self.addresses, size))

    @property
    def tags(self) -> tuple[str, ...]:
        """Returns the names of addresses in a trace."""
        return ("",) if self.shards == 1 else tuple("AB"[: self.shards])
