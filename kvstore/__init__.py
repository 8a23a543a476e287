"""kvstore: a distributed store for the KV caches of LLM inference.

``open`` makes this process a node of its own; ``connect`` goes through a worker.  Both give the same ``Store``.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from kvstore import errors
from kvstore.layout import Layout
from kvstore.version import VERSION

if TYPE_CHECKING:
    from kvstore.client import connect, open
    from kvstore.security.tls import ClientTls

# A process that uses kvstore may fork: an engine for its workers, say. By default gRPC's C library then runs handlers
# of its own in parent and child. They start threads in the child and use connections that it shares with its parent:
# the child hangs or is aborted inside fork, and calls of the parent break. Python's part of gRPC has them off by
# default. gRPC reads this once, when it is imported, so it is set before that; somebody else's setting stays.
# Without them gRPC does not work in a child of a process that had connected: kvstore/channels.py says so there.
if "grpc" not in sys.modules:
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

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
