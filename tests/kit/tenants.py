"""Chunks and holds of tenants on a worker in this process, made behind its access rules."""

from __future__ import annotations

import numpy as np

from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from tests.kit.secured import Secured
from tests.kit.stores import SMALL, kv_of

TOKENS = np.arange(2 * SMALL.chunk_tokens, dtype=np.uint32)


def hold_id(served: Secured, tenant: str) -> bytes:
    """Takes a hold as a client of this tenant has it; returns its id."""
    node = served.member.node
    cache = Store(LocalTransport(served.member)).namespace("m", SMALL, tenant=tenant)
    cache.put(TOKENS, kv_of(SMALL, TOKENS))
    hold = node.hold(node.chains.of(cache.namespace, TOKENS))
    served.worker.service.holds.add(hold)
    return hold.id
