"""Every timing of garbage collection in one place, with the relations between them checked once.

None of them is needed for safety, which rests on revisions and on the fence: they bound waiting and leftovers.  The two
exceptions are ages of leftovers, where somebody might still be using what looks abandoned; they say so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from kvstore.errors import InvalidRequest

NODE_LEASE_MAX_S = 3600.0


@dataclass(frozen=True, slots=True)
class Timings:
    """What a collector allows itself. Raises InvalidRequest where a value or a relation makes no sense."""

    meta_timeout_s: float = 5.0
    """A call to etcd."""
    refs_timeout_s: float = 120.0
    """The read of all keys with all pins, which may be a gigabyte."""
    poll_s_min: float = 0.05
    """Between two looks at what nodes have announced, at first."""
    poll_s_max: float = 1.0
    """The same after a while."""
    announce_lag_max_s: float = 375.0
    """A session that has not announced a sweep for this long is revoked (rule H4): its node has given up before, 330 s
    and one ttl after it heard of the sweep, which it does within two looks for a gap."""
    grace_max_s: float = 450.0
    """A sweep whose grace is not over by then is abandoned: closed without taking anything."""
    staging_age_s: float = 3600.0
    """Staged files of dead sessions are deleted at this age. A put must not take so long: it would have lost its files,
    and fail."""
    quarantine_age_s: float = 86_400.0
    """Damaged files are kept this long, for whoever wants to know how they became damaged."""
    orphan_age_s: float = 3600.0
    """Plans that no sweep names are deleted at this age: between writing one and naming it no collector takes so long,
    and one that does finds its sweep empty."""
    twin_margin_s: float = 3600.0
    """A pin's twin is deleted this long after the pin's end, by which clocks of hosts may disagree."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise InvalidRequest(f"timing {each.name}={value!r}: expected seconds, more than 0")
        if self.poll_s_min > self.poll_s_max:
            raise InvalidRequest(f"poll_s_min={self.poll_s_min} is over poll_s_max={self.poll_s_max}")
        if self.grace_max_s <= self.announce_lag_max_s:
            raise InvalidRequest(
                f"grace_max_s={self.grace_max_s} is not over announce_lag_max_s={self.announce_lag_max_s}: "
                "a sweep must outlast the node that delays it"
            )
