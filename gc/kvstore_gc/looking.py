"""The look at the victims of some plans, right before they are condemned (rule G1)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from kvstore.errors import KVStoreError
from kvstore.format import places
from kvstore.format.header import FIXED_BYTES, incarnation_at
from kvstore_gc.site import Site
from kvstore_gc.victims import Condemnation, SweepPlan, Victim

log = logging.getLogger(__name__)

Found = dict[int, list[Condemnation]]

USED = "used since it was listed"


def unused(site: Site, plans: Sequence[SweepPlan], spared: Counter[str]) -> Found:
    """Returns the publications of the victims that nobody used since they were listed, by shard; counts the others.

    A use of a chunk is a use of its parents too, but they may have been looked at before it. So if a use is seen, the
    victims that are left are looked at once more: a chunk that stays keeps its parents.
    """
    victims = {plan.shard: plan.victims for plan in plans}
    used_before = spared[USED]
    found = _look_all(site, victims, spared)
    if spared[USED] > used_before:
        left = {shard: {one.address for one in seen} for shard, seen in found.items()}
        again = {shard: [one for one in victims[shard] if one.address in left[shard]] for shard in left}
        found = _look_all(site, again, spared)
    return found


def _look_all(site: Site, listed: Mapping[int, Sequence[Victim]], spared: Counter[str]) -> Found:
    victims = [(shard, victim) for shard, some in listed.items() for victim in some]
    found: list[Condemnation | None] = [None] * len(victims)
    failed: list[KVStoreError] = []
    gone: list[Victim] = []

    def look(index: int) -> None:
        victim = victims[index][1]
        try:
            name = places.chunk(victim.address, victim.namespace, site.identity.shard_bits)
            seen = site.root.look(name, FIXED_BYTES)
        except KVStoreError as error:
            failed.append(error)  # one bad file must not keep all others from being collected
            return
        if seen is None:
            gone.append(victim)
        elif seen.stat.mtime_ns <= victim.mtime_ns:
            incarnation = incarnation_at(seen.prefix)
            found[index] = Condemnation(victim.address, victim.namespace, incarnation, seen.stat.size_bytes)

    site.each(len(victims), look)
    if failed:
        log.warning("sweep.unreadable count=%d such as: %s", len(failed), failed[0])
    spared["cannot be read"] += len(failed)
    spared["gone already"] += len(gone)
    spared[USED] += found.count(None) - len(failed) - len(gone)
    unused: Found = {}
    for (shard, _), one in zip(victims, found, strict=True):
        if one is not None:
            unused.setdefault(shard, []).append(one)
    return unused
