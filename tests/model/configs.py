"""The size of a world and its possible events; and the worlds that are searched, each named after what it adds."""

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


CONFIGS: dict[str, Config] = {
    # One shard.
    "hold": Config(),
    "join": Config(nodes=1),
    "deposed": Config(nodes=1, runs=3, incs=3, pins=True),
    "pins": Config(pins=True),
    "ppin": Config(pins=True, persistent_pins=True),
    "unpin": Config(nodes=1, pins=True, late_unpins=True),
    "cache": Config(nodes=1, runs=3, cache=True),
    "looks": Config(nodes=1, runs=3, looks=True),
    "big": Config(runs=3, pins=True),
    "hold+": Config(runs=3, cache=True, other_shard=True),
    "abandon": Config(nodes=1, runs=3, incs=3, pins=True, abandoning=True),
    # A lost watch, a rollback of etcd, both.
    "v3": Config(nodes=1, looks=True, other_shard=True, lost_watch=True),
    "c13": Config(rollback=True),
    "c13p": Config(nodes=1, pins=True, rollback=True),
    "c13d": Config(nodes=1, rollback=True, other_shard=True),
    "c13v": Config(nodes=1, rollback=True, other_shard=True, lost_watch=True),
    "c13vl": Config(nodes=1, rollback=True, other_shard=True, lost_watch=True, looks=True),
    "c13vp": Config(nodes=1, pins=True, rollback=True, lost_watch=True),
    # Two shards.
    "two": Config(nodes=1, shards=2, incs=1),
    "two2": Config(nodes=1, shards=2, incs=2),
    "two3": Config(nodes=1, shards=2, runs=3, sweeps=3, incs=1),
    "twov": Config(nodes=1, shards=2, incs=1, lost_watch=True),
    "two13": Config(nodes=1, shards=2, incs=1, rollback=True),
    "two13v": Config(nodes=1, shards=2, incs=1, rollback=True, lost_watch=True),
    "twoa": Config(nodes=1, shards=2, sweeps=3, incs=1, abandoning=True),
    "twoa3": Config(nodes=1, shards=2, runs=3, sweeps=3, incs=1, abandoning=True),
    "twon": Config(shards=2, incs=1),
    # Damaged files.
    "aside": Config(nodes=1, runs=1, sweeps=1, incs=3, menders=2, restorers=1),
    "asidep": Config(nodes=1, runs=1, sweeps=1, incs=3, menders=2, restorers=1, pins=True),
    "aside2": Config(nodes=1, sweeps=1, incs=3, menders=1, restorers=1),
    # Other roots.
    "s3": Config(nodes=1, runs=3, incs=3, pins=True, final_list=True, objects=True),
    "nolink": Config(nodes=1, runs=3, incs=3, pins=True, replaces=True),
}

QUICK = ("hold", "join", "unpin", "two", "pins", "cache", "twoa")
"""Worlds that take seconds, not minutes."""
