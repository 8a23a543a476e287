"""Adds the tier of peers to a worker: over its memory, under its session, between its memory and its disk."""

from __future__ import annotations

from random import Random

from kvstore.client.credentials import PLAIN, Credentials
from kvstore.meta.digests import Digests
from kvstore.node.member import Member
from kvstore.peers.limits import PeerLimits
from kvstore.peers.peers import Peers
from kvstore.peers.roster import Roster


def join_peers(member: Member, credentials: Credentials = PLAIN) -> Peers | None:
    """Adds a tier of peers to the member and returns it; None without memory, because such a node reads from no peer.

    Call ``start`` with the address that others reach it at, once it is served, and ``close`` before that ends.
    """
    tiers = member.node.tiers
    if tiers is None:
        return None
    clock, limits = member.node.clock, PeerLimits(sync_interval_s=tiers.settings.sync_interval_s)
    peers = Peers(
        Digests(member.meta, member.keys),
        member.presence,
        tiers.memory,
        Roster(limits, clock, Random(), credentials),
        member.node.counters,
        clock,
        limits,
        member.node.forget_namespace,
    )
    tiers.add_peers(peers)
    member.on_cleared.append(peers.tell_cleared)
    return peers
