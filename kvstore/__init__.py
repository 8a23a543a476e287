"""kvstore: a distributed store for the KV caches of LLM inference.

``open`` makes this process a node of its own; ``connect`` goes through a worker.  Both give the same ``Store``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore import errors
from kvstore.layout import Layout
from kvstore.version import VERSION

if TYPE_CHECKING:
    from kvstore.client import connect, open
    from kvstore.security.tls import ClientTls

__version__ = VERSION
__all__ = ["ClientTls", "Layout", "__version__", "connect", "errors", "open"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # Lazily, so that importing the package (for a layout, say) costs no gRPC and no file-system code.
    if name in ("connect", "open"):
        from kvstore import client

        return getattr(client, name)
    if name == "ClientTls":
        from kvstore.security.tls import ClientTls

        return ClientTls
    raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
