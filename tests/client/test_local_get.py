"""A get in this process whose node loses its session between the match and the read."""

from __future__ import annotations

import numpy as np

from kvstore.client.local import LocalTransport
from kvstore.client.store import Store
from kvstore.core.buffers import Planes, planes_of
from kvstore.core.namespace import Namespace
from kvstore.root.memory import MemoryFiles, MemoryRoot
from tests.kit.stores import TINY, kv_of, member_on

SPACE = Namespace.of("m", TINY)


def test_a_session_lost_between_match_and_read_is_a_miss_and_no_error() -> None:
    member = member_on(MemoryRoot(MemoryFiles()))
    port, tokens = LocalTransport(member), np.arange(4 * TINY.chunk_tokens, dtype=np.uint32)
    with Store(port) as store:
        store.namespace("m", TINY).put(tokens, kv_of(TINY, tokens))
        array = np.empty(TINY.shape(len(tokens)), TINY.numpy_dtype)

        def memory(count: int) -> Planes:
            assert count == 4
            member.node.holds.drop_all()  # as when the session ends
            return planes_of(array, TINY)

        assert port.get(SPACE, tokens, 4, memory) == 0
