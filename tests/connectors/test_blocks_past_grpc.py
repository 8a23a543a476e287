"""Connectors that use ``connect`` move the engines' blocks outside gRPC. No engine is needed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from kvstore.client.cache import BlockCache
from kvstore.connectors.common import OPAQUE_LAYOUT, EngineSettings, LazyStore
from kvstore.core.namespace import Namespace
from tests.kit.arenas import serving_memory
from tests.kit.engine_blocks import blocks_of, buffers_for, keys_of, same
from tests.kit.workers import Served

pytestmark = pytest.mark.slow


@contextmanager
def of_vllm(address: str) -> Iterator[BlockCache]:
    """Opens a store as the vLLM connector does, on its workers and in its scheduler."""
    link = LazyStore(EngineSettings.of({"connect": address}), [Namespace.of("m", OPAQUE_LAYOUT)])
    try:
        caches = link.caches()
        assert caches is not None
        yield caches[0]
    finally:
        link.close()


@contextmanager
def of_sglang_and_lmcache(address: str) -> Iterator[BlockCache]:
    """Opens a store as those two connectors do."""
    with EngineSettings.of({"connect": address}, "here").open() as store:
        yield store.namespace("m", OPAQUE_LAYOUT).blocks


@pytest.fixture
def served(tmp_root: Path) -> Iterator[Served]:
    with serving_memory(tmp_root) as found:
        yield found


@pytest.mark.parametrize("opened", [of_vllm, of_sglang_and_lmcache])
def test_a_connectors_blocks_go_through_shared_memory(
    served: Served, opened: Callable[[str], AbstractContextManager[BlockCache]]
) -> None:
    keys, blocks = keys_of(1, 20), blocks_of(1, 20, (100_000,))
    with opened(served.address) as cache:
        assert cache.present(keys) == [False] * 20
        assert cache.put(keys, blocks) == [True] * 20
        assert cache.match(keys) == 20
        buffers = buffers_for(blocks)
        with cache.hold(keys) as hold:
            assert hold.get(keys, buffers) == [True] * 20
        assert same(buffers, blocks)
        stats = cache._port.stats()
        assert stats["client_puts_shared"] == stats["client_gets_shared"] == 1
        assert stats["client_puts_grpc"] == stats["client_gets_grpc"] == 0
