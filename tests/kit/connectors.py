"""Connectors that need no engine, with the calls that all connectors have in common.

Those that need one (vLLM, SGLang, LMCache, transformers) run in tests/engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from kvstore.connectors.vineyard import FileCacheConfig, FilesystemType, KVCache
from kvstore.root.posix import PosixRoot
from tests.kit.faulty_root import FaultyRoot
from tests.kit.tensors import kv_of, over
from tests.kit.workers import serving

LAYERS, SIZE, CHUNK = 2, 16, 4
KINDS = ("vineyard", "vineyard worker")


class Connector(Protocol):
    """An engine's view of the store."""

    def store(self, tokens: Sequence[int], wrong: bool = False) -> int:
        """Stores the KV of a prompt, or other bytes; returns the number of tokens stored or found."""
        ...

    def load(self, tokens: Sequence[int]) -> int:
        """Returns the number of leading tokens loaded, every byte compared."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Vineyard:
    """KVCache."""

    def __init__(self, config: FileCacheConfig) -> None:
        self._cache = KVCache(config, SIZE, layer=LAYERS)

    def store(self, tokens: Sequence[int], wrong: bool = False) -> int:
        kv = kv_of(tokens, LAYERS, SIZE)
        kv ^= np.uint8(wrong)
        return self._cache.update(None, list(tokens), over(kv))

    def load(self, tokens: Sequence[int]) -> int:
        out = np.zeros((len(tokens), LAYERS, 2, SIZE), np.uint8)
        count = self._cache.query(None, list(tokens), over(out))
        assert np.array_equal(out[:count], kv_of(tokens, LAYERS, SIZE)[:count]), "wrong bytes"
        return count

    def close(self) -> None:
        self._cache.close()


@contextmanager
def opener(kind: str, folder: Path) -> Iterator[tuple[Callable[[], Connector], FaultyRoot | None]]:
    """What opens connectors of one kind on one store, and the store's root where it can be made to fail."""
    if kind == "vineyard":
        yield lambda: Vineyard(FileCacheConfig(chunk_size=CHUNK, root=str(folder))), None
        return
    faulty = FaultyRoot(PosixRoot(folder))
    with serving(faulty) as served:
        config = FileCacheConfig(
            chunk_size=CHUNK, root="x", filesystem_type=FilesystemType.VINEYARD, rpc_endpoint=served.address
        )
        yield lambda: Vineyard(config), faulty
