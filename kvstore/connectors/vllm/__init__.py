"""vLLM's KV connector: a request's prefix is loaded from the store, and the blocks it computes are stored.

Named on vLLM's command line; ``docs/vllm.md`` shows how.  Needs vLLM 0.32 or newer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.connectors.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    # Lazily: half of this package, and its tests, do not need vLLM.
    if name == "KVStoreConnector":
        from kvstore.connectors.vllm.connector import KVStoreConnector

        return KVStoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
