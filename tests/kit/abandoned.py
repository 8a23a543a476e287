"""Sweeps whose collector has died, and chunks that were published again."""

from __future__ import annotations

import pytest

from kvstore.engine.coordination import ClusterMember
from kvstore.format.header import INCARNATION_AT
from kvstore.format.keyset import ChunkKeys
from kvstore.format.places import Name
from kvstore.meta.keys import Keys
from kvstore.meta.sweeps import Condemned
from kvstore.root.interface import Root
from kvstore.testing.roots import content_of, publish
from tests.kit.clusters import Cluster, looking


class Died(Exception):
    """Killed, as far as anybody else can tell."""


def die(_: float) -> None:
    """Ends a collector that pauses: a ``pause`` that raises Died."""
    raise Died


def leave_in_flight(c: Cluster, node: ClusterMember, chain: ChunkKeys) -> None:
    """A collector condemns a chain and dies while it waits for the node."""
    hold = looking(node, chain)
    with pytest.raises(Died):
        c.collector(pause=die).sweep(c.plans(chain))
    node.node.holds.release(hold)


def in_flight(c: Cluster) -> list[Condemned]:
    """The sweeps in flight, as etcd has them."""
    return [Condemned.from_bytes(kv.value) for kv in c.store.list(Keys(c.identity.root).condemned).items]


def republish(root: Root, name: Name) -> bytes:
    """Replaces a chunk by another publication of it, as if it had been swept and put again; its content."""
    found = content_of(root, name)
    assert found is not None
    content = found[:INCARNATION_AT] + bytes([found[INCARNATION_AT] ^ 0xFF]) + found[INCARNATION_AT + 1 :]
    root.remove(name)
    assert publish(root, name, content, stamp_ns=1)
    return content
